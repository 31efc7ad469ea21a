"""Personalized Pieces (Tan, Liu and Jiang, EMNLP 2024)."""

from collections.abc import Iterator

import numpy as np
from flwr.app import Message, RecordDict

from fl_perpcs.assembly import Recipe
from fl_perpcs.messages import arrays_of, info_of, pack_pool, recipe_of, unpack_pieces
from fl_perpcs.phases import Phase, PhasedStrategy, Setting, evaluation
from fl_perpcs.pool import Pool, save_pool
from fl_perpcs.selection import select_sharers


class PerPcs(PhasedStrategy):
    """Sharers' pieces go into a pool; each target assembles its adapter from it.

    The server admits and hands on, it averages nothing. The run folder gets ``pool/`` and
    ``recipes.json``.

    Parameters
    ----------
    setting : Setting
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.embeddings: dict[str, np.ndarray] = {}
        self.pool = Pool(setting.spec)
        self.recipes: dict[str, Recipe] = {}

    def phases(self) -> Iterator[Phase]:
        """Embed, select, share, assemble; with the base LLM and OPPU beside it."""
        config, roles, run = self.setting.config, self.setting.roles, self.setting.run
        if config.sharers.selection == "k-means":
            yield Phase("embed", "query.embed", roles.candidates, self.keep_embedding)
        sharers = select_sharers(
            config.sharers.selection,
            config.sharers.count,
            {user: self.setting.members[user].history for user in roles.candidates},
            self.embeddings,
            min_history=config.sharers.min_history,
            seed=config.seed,
        )
        yield Phase("share", "train.share", sharers, self.admit)
        save_pool(self.pool, run.folder / "pool")
        if "base" in config.methods:
            yield evaluation(self.setting, "base")
        if "assembled" in config.methods:
            packed = pack_pool(self.pool.stacks())
            yield evaluation(
                self.setting, "assembled", lambda user: RecordDict(packed), self.keep_recipe
            )
            run.write_json("recipes.json", self.recipes)
        if "oppu" in config.methods:
            yield evaluation(self.setting, "oppu")

    def keep_embedding(self, user: str, reply: Message) -> None:
        """Keep a candidate's history embedding."""
        self.embeddings[user] = arrays_of(reply)["embedding"].numpy()

    def admit(self, user: str, reply: Message) -> None:
        """Check a sharer's pieces and put them into the pool."""
        self.pool.admit(user, unpack_pieces(arrays_of(reply)), info_of(reply)["base"])

    def keep_recipe(self, user: str, reply: Message) -> None:
        """Keep a target's recipe."""
        self.recipes[user] = recipe_of(reply)
