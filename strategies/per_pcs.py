"""Personalized Pieces (Tan, Liu and Jiang, EMNLP 2024)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fl_perpcs.assembly import Recipe
from fl_perpcs.errors import PerPcsError
from fl_perpcs.messages import arrays_of, info_of, pack_pool, recipe_of, unpack_pieces
from fl_perpcs.phases import Phase, PhasedStrategy, Setting, evaluation
from fl_perpcs.pool import Pool, load_pool, save_pool
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
        """Fill the pool, assemble from it; the base LLM and OPPU are evaluated beside it."""
        config, run = self.setting.config, self.setting.run
        yield from self.borrow_pool() if config.sharers.pool else self.fill_pool()
        save_pool(self.pool, run.folder / "pool")
        if "base" in config.methods:
            yield evaluation(self.setting, "base")
        if "assembled" in config.methods:
            packed = pack_pool(self.pool.stacks(), self.pool.fingerprint)
            yield evaluation(
                self.setting, "assembled", lambda user: RecordDict({**packed}), self.keep_recipe
            )
            run.write_json("recipes.json", self.recipes)
        if "oppu" in config.methods:
            yield evaluation(self.setting, "oppu")

    def fill_pool(self) -> Iterator[Phase]:
        """Select sharers among the candidates and admit their pieces."""
        config, roles = self.setting.config, self.setting.roles
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

    def borrow_pool(self) -> Iterator[Phase]:
        """Take an earlier run's pool, and let one target check that it fits the base LLM."""
        self.pool = load_pool(Path(self.setting.config.sharers.pool))
        if self.pool.spec != self.setting.spec:
            raise PerPcsError(
                f"sharers.pool holds pieces of rank {self.pool.spec.rank} and"
                f" {len(self.pool.spec.shapes)} sites, expected rank {self.setting.spec.rank} and"
                f" {len(self.setting.spec.shapes)} sites of the same shapes; use the base LLM and"
                " the lora settings of its run"
            )
        wanted = RecordDict({"pool": ConfigRecord({"base": self.pool.fingerprint})})
        yield Phase(
            "check the pool",
            "query.check_base",
            self.setting.roles.targets[:1],
            lambda user, reply: None,
            lambda user: RecordDict({**wanted}),
        )

    def keep_embedding(self, user: str, reply: Message) -> None:
        """Keep a candidate's history embedding."""
        self.embeddings[user] = arrays_of(reply)["embedding"].numpy()

    def admit(self, user: str, reply: Message) -> None:
        """Check a sharer's pieces and put them into the pool."""
        self.pool.admit(user, unpack_pieces(arrays_of(reply)), info_of(reply)["base"])

    def keep_recipe(self, user: str, reply: Message) -> None:
        """Keep a target's recipe."""
        self.recipes[user] = recipe_of(reply)
