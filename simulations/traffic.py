"""A whole run's traffic in closed form, from its config and how many play which role.

What :mod:`fl_perpcs.exchange.costs` says of one target, for every strategy and every phase; checked
against the ledger of real runs, and used to plan runs that nobody has made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from fl_perpcs.config import Config
from fl_perpcs.exchange import costs
from fl_perpcs.exchange.costs import HEADER, INT, Cost, Counts, Sizes
from fl_perpcs.ledger import NO_PHASE, Entry, read_ledger
from fl_perpcs.pool import load_pool
from fl_perpcs.runs import open_run, read_json
from fl_perpcs.selection import WITHOUT_EMBEDDINGS

AVERAGING = {
    "fedavg-lora": ("AB", "AB"),
    "fedavg-lora-tuned": ("AB", "AB"),
    "ffa-lora": ("B", "B"),
    "fedsa-lora": ("AB", "A"),
    "flora": ("AB", "AB"),
}
"""Strategies that average, and what they train and share."""
PARTS = ("adaptation", "sharing", "targets")
"""What traffic is told by: base LLM adaptation, what sharers send, what targets exchange."""

CHECK = "check the pool"

Traffic = dict[str, Cost]
"""By part, summed over its users; round trips are those of one user."""


@dataclass(frozen=True)
class Facts:
    """What a run's traffic depends on beside its config.

    Attributes
    ----------
    shapes : mapping of str to (int, int)
        (d_in, d_out) of every site.
    base, candidates, sharers, targets : int
        Users in each role.
    pool : mapping of str to float
        Pieces at each site.
    asked : mapping of str to float
        Pieces that a target wants at each site, mean over targets.
    batches : float
        Batches of a target's history, mean over targets.
    lacking : mapping of str to float, optional
        Pieces that a target's cache lacks; by default all.
    """

    shapes: Mapping[str, tuple[int, int]]
    base: int
    candidates: int
    sharers: int
    targets: int
    pool: Counts
    asked: Counts
    batches: float
    lacking: Counts | None = None

    @property
    def hidden(self) -> int:
        """The hidden size: what the first site reads."""
        return next(iter(self.shapes.values()))[0]


def expected(config: Config, facts: Facts) -> Traffic:
    """Return a run's bytes of arrays by part."""
    sizes = Sizes(facts.shapes, config.lora.rank, config.exchange.format)
    full = replace(sizes, how="float32")
    once = Cost(first_contact(config, facts), 0, 0)
    return {
        "adaptation": _adaptation(config, facts, full),
        "sharing": _sharing(config, facts, sizes, full, once),
        "targets": _times(once + _of_target(config, facts, sizes, full), facts.targets),
    }


def first_contact(config: Config, facts: Facts) -> float:
    """Return the bytes of the task adapter, which each user is sent once, whatever the strategy."""
    adapted = config.adaptation.mode != "none"
    return Sizes(facts.shapes, config.lora.rank).adapter() if adapted else 0.0


def measured(entries: list[Entry]) -> Traffic:
    """Return the bytes of arrays in a ledger by part."""
    found: Traffic = {}
    for part in PARTS:
        own = [e for e in entries if part_of(e) == part]
        trips: dict[str, int] = {}
        for entry in own:
            answers = entry.direction == "up" and entry.phase != CHECK  # which is one user's alone
            trips[entry.user] = trips.get(entry.user, 0) + answers
        found[part] = Cost(
            sum(e.arrays for e in own if e.direction == "down"),
            sum(e.arrays for e in own if e.direction == "up"),
            max(trips.values(), default=0),
        )
    return found


def facts_of(folder: Path) -> Facts:
    """Read from a finished run what its traffic depends on."""
    _, config = open_run(folder)
    results = read_json(folder / "results.json")
    roles = results["roles"]
    shapes: dict[str, tuple[int, int]] = {}
    pool: dict[str, float] = {}
    asked: dict[str, float] = {}
    sharers = config.sharers.count
    if (folder / "pool").is_dir():
        kept = load_pool(folder / "pool")
        shapes, sharers = dict(kept.spec.shapes), len(kept.pieces)
        stacks = kept.stacks()
        pool = {site: len(stack.sharers) for site, stack in stacks.items()}
    else:
        from fl_perpcs.lm import site_shapes

        shapes = site_shapes(config)
    if (folder / "recipes.json").is_file():
        recipes = list(read_json(folder / "recipes.json").values())
        for site, n in pool.items():
            wanted = [len(recipe.get(site, {})) for recipe in recipes]
            asked[site] = sum(min(n, w + config.exchange.decoys) for w in wanted) / len(wanted)
    how = config.assembly
    roles_limits = (config.roles.max_history, config.roles.target_history)
    limits = [n for n in (how.max_history, *roles_limits) if n]
    lengths = [min([results["history"][user], *limits]) for user in roles["targets"]]
    rows = [1 if how.per == "history" else ceil(n / how.batch_size) for n in lengths]
    return Facts(
        shapes,
        len(roles["base"]),
        len(roles["candidates"]),
        sharers,
        len(roles["targets"]),
        pool,
        asked,
        sum(rows) / len(rows),
        _lacking(folder, pool, len(shapes)) if config.exchange.cache else None,
    )


def _lacking(folder: Path, pool: Counts, sites: int) -> Counts:
    """Return what targets said that their caches lacked, spread over the sites."""
    asked = [
        entry.arrays
        for entry in read_ledger(folder)
        if entry.message == "query.lacking" and entry.direction == "up"
    ]
    pieces = (sum(asked) / len(asked) - 2 * HEADER - INT * sites) / INT
    share = pieces / sum(pool.values())
    return {site: share * n for site, n in pool.items()} if pieces else {}


def part_of(entry: Entry) -> str:
    """Return which of :data:`PARTS` a message belongs to; "" for the hello to nodes."""
    if entry.phase == NO_PHASE:
        return ""
    if entry.phase.startswith("adapt"):
        return "adaptation"
    first = entry.phase.split(",")[0]
    return "sharing" if first in ("embed", "share", "population", "average") else "targets"


def _adaptation(config: Config, facts: Facts, full: Sizes) -> Cost:
    how = config.adaptation
    if how.mode != "federated":
        return Cost(0, 0, 0)
    a_round = Cost(full.adapter(), full.adapter(), 1)
    evaluated = Cost(full.adapter(), 0, 1)
    trained = _times(a_round, how.rounds * max(1, int(facts.base * how.fraction_train)))
    asked = _times(evaluated, how.rounds * int(facts.base * how.fraction_evaluate))
    return replace(trained + asked, round_trips=how.rounds * (1 + (how.fraction_evaluate > 0)))


def _sharing(config: Config, facts: Facts, sizes: Sizes, full: Sizes, once: Cost) -> Cost:
    name = config.strategy.name
    total = Cost(0, 0, 0)
    if name in ("base", "rag", "pag", "oppu"):
        return total
    embedding = Cost(0, 4 * facts.hidden + HEADER, 1)
    selects = not config.sharers.pool and config.sharers.selection not in WITHOUT_EMBEDDINGS
    met = 0
    if selects:
        total += _times(embedding + once, facts.candidates)
        met = facts.candidates
    if name in AVERAGING:
        return total + _rounds(config, facts, full, once if not met else Cost(0, 0, 0))
    if not config.sharers.pool:
        sites = sum(facts.pool.values()) / facts.sharers
        total += _times(Cost(0, sizes.share(sites), 1), facts.sharers)
        total += _times(once, max(0, facts.sharers - met))
        met = max(met, facts.sharers)
    if name == "retrieval":
        total += _times(embedding, facts.sharers) + _times(once, max(0, facts.sharers - met))
    asks_at_large = config.assembly.scorer != "published" or "popularity" in config.rules
    if name == "per-pcs" and asks_at_large:
        users = facts.base or facts.candidates
        total += _times(Cost(0, full.queries(), 1) + once, users)
    return total


def _rounds(config: Config, facts: Facts, full: Sizes, once: Cost) -> Cost:
    """Return the cost of averaging; FLoRA's sharers get the base LLM so far in every round."""
    _, shares = AVERAGING[config.strategy.name]
    shared = full.factors(full.shapes, shares)
    rounds = config.averaging.rounds
    total = _times(Cost(shared, shared, 1), rounds)
    if config.strategy.name == "flora":
        adapted = config.lora.rank if config.adaptation.mode != "none" else 0
        ranks = [adapted + number * facts.sharers * config.lora.rank for number in range(rounds)]
        stacks = sum(replace(full, rank=rank).adapter() for rank in ranks if rank)
        total += Cost(stacks, 0, 0)
    else:
        total += once
    return replace(_times(total, facts.sharers), round_trips=rounds)


def _of_target(config: Config, facts: Facts, sizes: Sizes, full: Sizes) -> Cost:
    """Return what a target exchanges for its answers, without the task adapter."""
    name, how = config.strategy.name, config.exchange
    given = Cost(full.adapter(), 0, 1)
    if name in ("base", "rag", "pag", "oppu"):
        return Cost(0, 0, 1)
    if name == "retrieval":
        return Cost(facts.sharers * (4 * facts.hidden + HEADER), 0, 1) + given
    if name == "lorahub":
        return Cost(sizes.pieces(facts.pool, gates=False), 0, 1)
    if name == "flora":
        return Cost(replace(full, rank=_flora_rank(config, facts)).adapter(), 0, 1)
    if name != "per-pcs":
        return given
    stages, centred = len(costs.stages_of(facts.shapes)), config.assembly.scorer != "published"
    if how.protocol == "layerwise":
        stages = len(costs.stages_of({site: facts.shapes[site] for site in facts.pool}))
        return costs.layerwise(sizes, facts.pool, facts.asked, stages, centred=centred)
    if how.protocol == "one-shot":
        return costs.one_shot(sizes, facts.pool, facts.asked, centred=centred)
    if how.protocol == "server-match" and how.match == "at-once":
        return costs.server_match(sizes, facts.batches)
    if how.protocol == "server-match":
        return costs.server_match_by_stages(sizes, facts.pool, facts.batches, stages)
    if how.cache:
        lacking = facts.pool if facts.lacking is None else facts.lacking
        return costs.cached(sizes, facts.pool, lacking, centred=centred)
    return costs.broadcast(sizes, facts.pool, centred=centred)


def _flora_rank(config: Config, facts: Facts) -> int:
    return config.averaging.rounds * facts.sharers * config.lora.rank


def _times(cost: Cost, users: float) -> Cost:
    return Cost(cost.down * users, cost.up * users, cost.round_trips)
