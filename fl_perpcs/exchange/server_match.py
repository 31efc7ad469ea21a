"""Server match: targets send queries, the server scores, merges and returns finished factors.

The least traffic, and the server learns most: what each target's history asks of every site, and
its recipe. ``exchange.match`` says where queries are from: the base LLM's activations, all at once,
or stage by stage with the merged pieces of each batch in place, which is the published result.
"""

from collections.abc import Iterator, Mapping

import torch
from flwr.app import ArrayRecord, Message, RecordDict

from fl_perpcs.assembly import Recipe, assemble_at_once, choose_at, cook, merge
from fl_perpcs.assembly.choosing import Choice
from fl_perpcs.assembly.passes import averaged
from fl_perpcs.errors import PerPcsError
from fl_perpcs.exchange.offer import METHOD, Offer, until_done
from fl_perpcs.messages import info_of, pack_adapter, pack_tensors, tensors_of
from fl_perpcs.phases import Phase, Phases, Setting, evaluation
from fl_perpcs.seeds import assembly_seed, derive_seed


def server_match(setting: Setting, offer: Offer) -> Phases:
    """Ask for queries, choose for everybody, and send what came of it."""
    recipes: dict[str, Recipe] = {}
    if setting.config.exchange.match == "at-once":
        yield from _at_once(setting, offer, recipes)
    else:
        yield from _by_stages(setting, offer, recipes)
    how, merge_how = setting.config.exchange.format, setting.config.assembly.merge

    def content(user: str) -> RecordDict:
        adapter = cook(recipes[user], offer.stacks, merge_how)
        return RecordDict({"adapter": pack_adapter(adapter, how)})

    yield evaluation(setting, METHOD, content, action="finished")
    named = {user: offer.named(recipe) for user, recipe in recipes.items()}
    setting.run.write_json("recipes.json", named)


def _at_once(setting: Setting, offer: Offer, recipes: dict[str, Recipe]) -> Iterator[Phase]:
    config = setting.config

    def collect(user: str, reply: Message) -> None:
        seed = assembly_seed(config.seed, user)
        queries = queries_of(reply, user, setting.spec.shapes)
        recipes[user] = assemble_at_once(
            queries, offer.stacks, config.assembly, seed, offer.population
        )

    yield Phase("ask for queries", "query.all_queries", setting.roles.targets, collect)


def _by_stages(setting: Setting, offer: Offer, recipes: dict[str, Recipe]) -> Iterator[Phase]:
    """Let all batches of all targets advance in lock-step; recipes are there at the end."""
    config = setting.config
    # For each target and batch what was chosen so far, and for each target what to send next.
    choices: dict[str, list[dict[str, Choice]]] = {}
    merged: dict[str, ArrayRecord] = {}
    going_on = set(setting.roles.targets)

    def collect(user: str, reply: Message) -> None:
        seed = assembly_seed(config.seed, user)
        tensors: dict[str, torch.Tensor] = {}
        queries = queries_of(reply, user, setting.spec.shapes)
        for site, rows in queries.items():
            if site not in offer.stacks:
                continue
            chosen = choices.setdefault(user, [{} for _ in rows])
            for number, row in enumerate(rows):
                choice = choose_at(
                    site,
                    offer.stacks[site],
                    row,
                    config.assembly,
                    derive_seed(seed, number),
                    offer.population,
                )
                chosen[number][site] = choice
                A, B = merge(offer.stacks[site], choice, config.assembly.merge)
                tensors |= {f"{number} {site}.lora_A": A, f"{number} {site}.lora_B": B}
        merged[user] = pack_tensors(tensors, config.exchange.format)
        if not info_of(reply)["more"]:
            going_on.discard(user)
            recipes[user] = averaged(choices.pop(user), offer.stacks)

    yield Phase("ask for queries", "query.first_queries", setting.roles.targets, collect)
    yield from until_done(
        going_on,
        "send factors",
        "query.next_queries",
        collect,
        lambda user: RecordDict({"factors": merged[user]}),
    )


def queries_of(
    reply: Message, user: str, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Return a target's queries, checked.

    Returns
    -------
    dict of str to Tensor
        (batches, d_in) by site, in the order of the forward pass.

    Raises
    ------
    PerPcsError
        If a site is unknown, or queries are of another width or not finite.
    """
    found = tensors_of(reply, "arrays")
    for site, rows in found.items():
        if site not in shapes:
            raise PerPcsError(f"user {user!r} sends queries of the unknown site {site!r}")
        width = shapes[site][0]
        fits = rows.ndim == 2 and len(rows) > 0 and rows.shape[1] == width
        if not fits or not torch.isfinite(rows).all():
            raise PerPcsError(
                f"user {user!r} sends queries of shape {tuple(rows.shape)} at {site!r}, expected"
                f" finite numbers of shape (batches, {width})"
            )
    return {site: found[site] for site in shapes if site in found}
