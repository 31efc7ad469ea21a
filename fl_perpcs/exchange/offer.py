"""The pool as the server hands it out, and what protocols have in common."""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Message, RecordDict

from fl_perpcs.assembly import Recipe, pick
from fl_perpcs.errors import PerPcsError
from fl_perpcs.messages import pack_pool, pack_tensors, unpack_recipe, unpack_request
from fl_perpcs.phases import Collect, Phase, Setting, evaluation
from fl_perpcs.pool import Pool, Stack, number_name, numbered

METHOD = "assembled"
"""The row of the result table."""


@dataclass(frozen=True)
class Offer:
    """A pool for targets, who see sharers as numbers.

    Attributes
    ----------
    stacks : dict of str to Stack
        Pieces by site.
    sharers : tuple of str
        The ids behind the numbers.
    base : str
        Fingerprint of the base LLM that the pieces are for.
    population : dict of str to Tensor, optional
        The population's query of each site, for scorers that look at it.
    """

    stacks: dict[str, Stack]
    sharers: tuple[str, ...]
    base: str
    population: dict[str, torch.Tensor] | None = None

    def pack(self, how: str, *, gates: bool = True, factors: bool = True) -> RecordDict:
        """Return the records that hold the whole pool, or only its gates or factors."""
        content = pack_pool(self.stacks, self.base, how, gates=gates, factors=factors)
        if self.population is not None and gates:
            content["population"] = pack_tensors(self.population, how)
        return content

    def pack_asked(
        self, request: Mapping[str, tuple[str, ...]], how: str, *, gates: bool = False
    ) -> RecordDict:
        """Return the records that hold some pieces."""
        return pack_pool(pick(self.stacks, request), self.base, how, gates=gates)

    def request_of(self, user: str, reply: Message, sites: tuple[str, ...]) -> dict[str, Any]:
        """Return which pieces a target asks for, checked.

        Raises
        ------
        PerPcsError
            If the pool has no such piece.
        """
        request = dict(unpack_request(reply, sites))
        for site, wanted in request.items():
            known = set(self.stacks[site].sharers) if site in self.stacks else set()
            if strange := sorted(set(wanted) - known):
                raise PerPcsError(
                    f"user {user!r} asks for the piece of sharer number {strange[0]} at {site!r},"
                    " which the pool does not have"
                )
        return request

    def named(self, recipe: Recipe) -> Recipe:
        """Return a recipe with sharers' ids in place of their numbers."""
        ids = {number_name(number): sharer for number, sharer in enumerate(self.sharers)}
        return {
            site: {ids[number]: weight for number, weight in weights.items()}
            for site, weights in recipe.items()
        }


def offered(pool: Pool) -> Offer:
    """Make a pool ready to be handed out."""
    sharers = tuple(sorted(pool.pieces))
    return Offer(numbered(pool.stacks(), sharers), sharers, pool.fingerprint)


def send_gates(setting: Setting, offer: Offer, collect: Collect) -> Phase:
    """Return the phase in which targets get the pool's gates and ask for their first pieces."""
    gates = offer.pack(setting.config.exchange.format, factors=False)
    targets = setting.roles.targets
    return Phase("send gates", "query.choose", targets, collect, lambda user: RecordDict({**gates}))


def until_done(
    going_on: set[str],
    name: str,
    message_type: str,
    collect: Collect,
    content: Callable[[str], RecordDict],
) -> Iterator[Phase]:
    """Yield a phase for each further stage, with those who are still in ``going_on``."""
    stage = 0
    while going_on:
        stage += 1
        yield Phase(f"{name} {stage}", message_type, tuple(sorted(going_on)), collect, content)


def with_recipes(
    setting: Setting,
    offer: Offer,
    method: str,
    content: Callable[[str], RecordDict],
    action: str,
) -> Generator[Phase, None, None]:
    """Let targets answer with what they are sent; their recipes go to ``recipes.json``."""
    recipes: dict[str, Recipe] = {}
    sites = tuple(setting.spec.shapes)

    def keep(user: str, reply: Message) -> None:
        recipes[user] = offer.named(unpack_recipe(reply, sites))

    yield evaluation(setting, method, content, keep, action=action)
    setting.run.write_json("recipes.json", recipes)
