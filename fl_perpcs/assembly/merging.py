"""From weighted pieces to factors, and from recipes to adapters."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from fl_perpcs.assembly.choosing import Choice
from fl_perpcs.config import MERGES as NAMES
from fl_perpcs.pieces import Adapter, Factors
from fl_perpcs.plugins import find
from fl_perpcs.pool import Stack

Recipe = dict[str, dict[str, float]]
"""Weights of sharers' pieces by site: ``recipe[site][sharer]``."""

Request = Mapping[str, Sequence[str]]
"""Whose pieces are asked for, by site."""

Merge = Callable[[Stack, Choice], Factors]
"""The pieces of a site and those chosen, to the site's factors."""


def factor(stack: Stack, choice: Choice) -> Factors:
    """Return A = Σ w_i A_i and B = Σ w_i B_i, of rank r, as published."""
    w, A, B = _chosen(stack, choice)
    return Factors((w * A).sum(dim=0), (w * B).sum(dim=0))


def delta(stack: Stack, choice: Choice) -> Factors:
    """Return factors with B·A = Σ w_i B_i A_i exactly, of rank r times the number of pieces."""
    w, A, B = _chosen(stack, choice)
    return Factors(A.flatten(0, 1), (w * B).transpose(0, 1).flatten(1))


_BUILT_IN: dict[str, Merge] = dict(zip(NAMES, (factor, delta), strict=True))


def as_choice(stack: Stack, weights: Mapping[str, float]) -> Choice:
    """Return the pieces of some sharers with their weights; the inverse of :func:`named`."""
    at = [stack.sharers.index(sharer) for sharer in weights]
    return Choice(
        torch.tensor(at, dtype=torch.long, device=stack.A.device),
        torch.tensor(list(weights.values()), device=stack.A.device),
    )


def named(stack: Stack, choice: Choice) -> dict[str, float]:
    """Return a choice as weights by sharer, best first."""
    chosen = zip(choice.indices.tolist(), choice.weights.tolist(), strict=True)
    return {stack.sharers[i]: weight for i, weight in chosen}


def merge(stack: Stack, choice: Choice, how: str) -> Factors:
    """Merge weighted pieces of one site.

    Parameters
    ----------
    stack : Stack
    choice : Choice
        Which pieces of the stack, with which weight. Gradients flow into the weights.
    how : str
        As ``assembly.merge``: :func:`factor`, :func:`delta` or a plug-in.

    Returns
    -------
    Factors
        One piece of weight 1 comes back bit for bit.
    """
    merged: Factors = find("assembly.merge", how, _BUILT_IN)(stack, choice)
    return merged


def cook(recipe: Recipe, stacks: Mapping[str, Stack], how: str) -> Adapter:
    """Return the adapter of a recipe.

    Parameters
    ----------
    recipe : Recipe
    stacks : mapping of str to Stack
        The pool that the recipe was made from.
    how : str
        As in :func:`merge`.

    Returns
    -------
    Adapter
    """
    return {
        site: merge(stacks[site], as_choice(stacks[site], weights), how)
        for site, weights in recipe.items()
    }


def whole(weights: Mapping[str, float], stacks: Mapping[str, Stack]) -> Recipe:
    """Return the recipe that weighs whole adapters: at each site those of the sharers there."""
    return {
        site: {sharer: weights[sharer] for sharer in stack.sharers if sharer in weights}
        for site, stack in stacks.items()
    }


def normalized(recipe: Recipe) -> Recipe:
    """Return a recipe whose weights sum to 1 at every site: not every sharer has every piece."""
    return {
        site: {sharer: weight / sum(weights.values()) for sharer, weight in weights.items()}
        for site, weights in recipe.items()
    }


def recipe_bytes(recipe: Recipe) -> int:
    """Return what a recipe takes to store: a 32-bit piece number and a 32-bit weight each."""
    return 8 * sum(map(len, recipe.values()))


def sharers_in(stacks: Mapping[str, Stack]) -> list[str]:
    """Return everybody who has a piece in the pool, sorted."""
    return sorted({sharer for stack in stacks.values() for sharer in stack.sharers})


def keep(stacks: Mapping[str, Stack], sharers: Iterable[str]) -> dict[str, Stack]:
    """Return the pool with these sharers' pieces only; sites without any are left out."""
    wanted = set(sharers)
    return pick(stacks, {site: [*wanted] for site in stacks})


def pick(stacks: Mapping[str, Stack], request: Request) -> dict[str, Stack]:
    """Return the pieces that are asked for, in the pool's order; sites without any are left out."""
    picked = {}
    for site, stack in stacks.items():
        wanted = set(request.get(site, ()))
        at = [i for i, sharer in enumerate(stack.sharers) if sharer in wanted]
        if at:
            names = tuple(stack.sharers[i] for i in at)
            picked[site] = Stack(names, stack.A[at], stack.B[at], stack.gates[at])
    return picked


def on_device(stacks: Mapping[str, Stack], device: torch.device) -> dict[str, Stack]:
    """Return the pool with its tensors on a device."""
    return {
        site: Stack(s.sharers, s.A.to(device), s.B.to(device), s.gates.to(device))
        for site, s in stacks.items()
    }


def _chosen(stack: Stack, choice: Choice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    A, B = stack.A[choice.indices], stack.B[choice.indices]
    return choice.weights.to(A.dtype)[:, None, None], A, B
