"""Who shares, and the pool of what they share: where strategies on pieces begin."""

import random
from collections.abc import Generator
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fl_perpcs.admission import guarded
from fl_perpcs.errors import PerPcsError
from fl_perpcs.messages import arrays_of, info_of, tensors_of, unpack_pieces
from fl_perpcs.phases import Phase, Setting
from fl_perpcs.pieces import Piece
from fl_perpcs.pool import Pool, load_pool, save_pool
from fl_perpcs.seeds import derive_seed
from fl_perpcs.selection import WITHOUT_EMBEDDINGS, select_sharers


def sharers_of(setting: Setting) -> Generator[Phase, None, list[str]]:
    """Select sharers among the candidates; a borrowed pool has its own."""
    config = setting.config
    if config.sharers.pool:
        return sorted(borrowed(setting).pieces)
    candidates = setting.roles.candidates
    embeddings: dict[str, torch.Tensor] = {}
    if config.sharers.selection not in WITHOUT_EMBEDDINGS:
        embeddings = yield from embeddings_of(candidates)
    return select_sharers(
        config.sharers.selection,
        config.sharers.count,
        {user: setting.members[user].history for user in candidates},
        {user: embedding.numpy() for user, embedding in embeddings.items()},
        min_history=config.sharers.min_history,
        seed=config.seed,
    )


def embeddings_of(users: tuple[str, ...]) -> Generator[Phase, None, dict[str, torch.Tensor]]:
    """Ask users for their mean history embeddings, (hidden size,) each."""
    embeddings: dict[str, torch.Tensor] = {}

    def collect(user: str, reply: Message) -> None:
        embeddings[user] = tensors_of(reply, "arrays")["embedding"]

    yield Phase("embed", "query.embed", users, collect)
    return embeddings


def pool_of(setting: Setting) -> Generator[Phase, None, Pool]:
    """Fill a pool with the sharers' pieces, or borrow one; the run folder gets ``pool/``."""
    if setting.config.sharers.pool:
        pool = borrowed(setting)
        yield check_base(setting, pool)
    else:
        sharers = yield from sharers_of(setting)
        pool = yield from filled(setting, sharers)
    save_pool(pool, setting.run.folder / "pool")
    return pool


def filled(setting: Setting, sharers: list[str]) -> Generator[Phase, None, Pool]:
    """Let sharers share; with ``admission.rules`` the odd ones are left out and named."""
    rules = setting.config.rules
    pool = Pool(setting.spec)
    shares: dict[str, list[Piece]] = {}
    bases: dict[str, str] = {}

    def admit(user: str, reply: Message) -> None:
        pieces, base = unpack_pieces(arrays_of(reply)), str(info_of(reply)["base"])
        if rules:
            shares[user], bases[user] = pieces, base
        else:
            pool.admit(user, pieces, base)

    yield Phase("share", "train.share", sharers, admit)
    if not rules:
        return pool
    population = (yield from population_of(setting)) if "popularity" in rules else None
    pool, reasons = guarded(setting.spec, shares, bases, rules, population)
    for sharer, reason in reasons.items():
        setting.run.event("refused", user=sharer, reason=reason)
    setting.run.write_json("refused.json", reasons)
    return pool


def population_of(setting: Setting) -> Generator[Phase, None, dict[str, torch.Tensor]]:
    """Return what users at large ask of each site: the mean query of the base users' histories.

    Without base users the candidates are asked.
    """
    users = setting.roles.base or setting.roles.candidates
    sums: dict[str, torch.Tensor] = {}

    def add(user: str, reply: Message) -> None:
        for site, query in tensors_of(reply, "arrays").items():
            sums[site] = sums.get(site, torch.zeros(())) + query

    yield Phase("population", "query.site_queries", users, add)
    return {site: total / len(users) for site, total in sums.items()}


def borrowed(setting: Setting) -> Pool:
    """Take an earlier run's pool, or as many of its sharers as are wanted.

    Fewer sharers are a subset of more, so that pools of several sizes can be compared.

    Raises
    ------
    PerPcsError
        If it is no pool, or of other sites or another rank than this run's adapters.
    """
    config = setting.config
    pool = load_pool(Path(config.sharers.pool))
    if pool.spec != setting.spec:
        raise PerPcsError(
            f"sharers.pool holds pieces of rank {pool.spec.rank} and"
            f" {len(pool.spec.shapes)} sites, expected rank {setting.spec.rank} and"
            f" {len(setting.spec.shapes)} sites of the same shapes; use the base LLM and"
            " the lora settings of its run"
        )
    order = sorted(pool.pieces)
    random.Random(derive_seed(config.seed, "borrow")).shuffle(order)
    kept = set(order[: config.sharers.count])
    pieces = {sharer: found for sharer, found in pool.pieces.items() if sharer in kept}
    return Pool(pool.spec, pool.fingerprint, pieces)


def check_base(setting: Setting, pool: Pool) -> Phase:
    """Return the phase in which one target checks that a pool fits the base LLM."""
    wanted = RecordDict({"pool": ConfigRecord({"base": pool.fingerprint})})
    return Phase(
        "check the pool",
        "query.check_base",
        setting.roles.targets[:1],
        lambda user, reply: None,
        lambda user: RecordDict({**wanted}),
    )
