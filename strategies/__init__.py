"""Strategies, one file each, by the name that ``strategy.name`` gives."""

from strategies.per_pcs import PerPcs

REGISTRY = {
    "per-pcs": PerPcs,
}
"""A strategy is a callable that takes a :class:`fl_perpcs.phases.Setting`."""
