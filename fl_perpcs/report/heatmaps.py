"""Heat maps of who picked whose pieces: targets down, sharers across."""

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fl_perpcs.report.drawing import COLOR, HEAT, PERCENT, STYLE, inline_svg, short
from fl_perpcs.report.facts import Choices

MAX_LABELS = 16
"""More groups than this are framed, but not named."""

_STYLE: Any = {**STYLE, "font.size": 8, "axes.titlesize": 8}
_INCHES = 0.07  # of a letter in a group's name
_SPACE = (0.15, 0.3)  # inches between the layers' heat maps


def choices_figure(found: Choices) -> str:
    """Draw the recipes averaged over all sites, as SVG.

    Parameters
    ----------
    found : Choices
        Sorted by group (:func:`fl_perpcs.report.facts.by_group`).
    """
    cell = (_cell(len(found.sharers), 6.2), _cell(len(found.targets), 7.5))
    width, height = cell[0] * len(found.sharers), cell[1] * len(found.targets)
    ceiling = float(found.overall.max())
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0, 0, 1, 1))
        _heat(axes, found.overall, ceiling)
        for axis, users, inches in (
            (axes.xaxis, found.sharers, cell[0]),
            (axes.yaxis, found.targets, cell[1]),
        ):
            names = [short(user) for user in users]
            axis.set_ticks(range(len(users)), names, fontsize=min(8, inches * 72 * 0.8))
        axes.tick_params(axis="x", rotation=90)
        axes.set_xlabel("sharer")
        axes.set_ylabel("target")
        if min(cell) > 0.15:
            _gaps(axes, *found.overall.shape)
        _frames(axes, found, linewidth=1.2)
        room = _name_groups(axes, found, cell)
        _scale(figure, ceiling, above=room + 0.4)
        return inline_svg(figure, "Weight of each sharer in each target's recipe")


def layers_figure(found: Choices) -> str:
    """Draw the recipes once per layer, as SVG; nothing if there is one layer only.

    Parameters
    ----------
    found : Choices
        Sorted by group (:func:`fl_perpcs.report.facts.by_group`).
    """
    if len(found.layers) < 2:
        return ""
    across = _across(len(found.layers))
    down = -(-len(found.layers) // across)
    beside, below = _SPACE
    fitting = (8.4 - beside * (across - 1)) / across
    width = max(0.6, min(2.0, fitting, 0.3 * len(found.sharers)))
    height = width * min(1.6, max(0.45, len(found.targets) / len(found.sharers)))
    total = across * (width + beside) - beside, down * (height + below) - below
    ceiling = float(found.weights.max())
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=total)
        for number, layer in enumerate(found.layers):
            line, place = divmod(number, across)
            left, top = place * (width + beside), line * (height + below)
            axes = figure.add_axes(
                (
                    left / total[0],
                    1 - (top + height) / total[1],
                    width / total[0],
                    height / total[1],
                )
            )
            _heat(axes, found.weights[number], ceiling)
            axes.set_title(f"layer {layer}", pad=3, loc="left", color=COLOR["ink-2"])
            axes.set_xticks([])
            axes.set_yticks([])
            if place == 0:
                axes.set_ylabel("target")
            if number + across >= len(found.layers):
                axes.set_xlabel("sharer")
            _frames(axes, found, linewidth=0.8)
        _scale(figure, ceiling, above=0.55)
        return inline_svg(figure, "Weight of each sharer in each target's recipe, by layer")


def _cell(count: int, inches: float) -> float:
    """Return the side of a cell, so that ``count`` of them fit and their names are legible."""
    return min(0.3, max(0.115, inches / count))


def _across(count: int) -> int:
    """Return how many layers go side by side: up to six, leaving few places empty."""
    if count <= 4:
        return count
    return max((4, 5, 6), key=lambda across: (-(-count % across), across))


def _heat(axes: Axes, values: NDArray[np.float64], ceiling: float) -> None:
    axes.imshow(values, cmap=HEAT, vmin=0, vmax=ceiling or 1, interpolation="none", aspect="auto")
    axes.tick_params(length=0, pad=3)


def _gaps(axes: Axes, rows: int, columns: int) -> None:
    """Part the cells of a small heat map."""
    look: dict[str, Any] = {"color": COLOR["surface"], "linewidth": 1.0}
    axes.vlines(np.arange(columns - 1) + 0.5, -0.5, rows - 0.5, **look)
    axes.hlines(np.arange(rows - 1) + 0.5, -0.5, columns - 0.5, **look)


def _scale(figure: Figure, ceiling: float, above: float) -> None:
    """Draw the colour scale, in inches above the figure.

    A colorbar of matplotlib would show seams between its half-transparent steps.
    """
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0, 1 + above / height, 1.8 / width, 0.11 / height))
    steps = np.linspace(0, 1, 64)[None, :]
    extent = (0.0, ceiling, 0.0, 1.0)
    axes.imshow(steps, cmap=HEAT, extent=extent, aspect="auto", interpolation="none")
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(PERCENT)
    axes.tick_params(length=2, pad=2, labelsize=7.5)
    axes.set_title("weight in the recipe", loc="left", pad=3, color=COLOR["ink-2"])


def spans(names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first, last) for each stretch of equal names."""
    start = 0
    for index in range(1, len(names) + 1):
        if index == len(names) or names[index] != names[start]:
            yield names[start], start, index - 1
            start = index


def _frames(axes: Axes, found: Choices, linewidth: float) -> None:
    """Draw the lines between groups, and frame where target and sharer share one."""
    down, across = list(spans(found.target_groups)), list(spans(found.sharer_groups))
    if len({*found.target_groups, *found.sharer_groups}) <= MAX_LABELS:
        for _, first, _ in down[1:]:
            axes.axhline(first - 0.5, color=COLOR["axis"], linewidth=0.7)
        for _, first, _ in across[1:]:
            axes.axvline(first - 0.5, color=COLOR["axis"], linewidth=0.7)
    if not found.groups_differ:
        return
    for name, top, bottom in down:
        for other, left, right in across:
            if name and name == other:
                frame = Rectangle(
                    (left - 0.5, top - 0.5),
                    right - left + 1,
                    bottom - top + 1,
                    fill=False,
                    clip_on=False,
                    zorder=5,
                    edgecolor=COLOR["ink"],
                    linewidth=linewidth,
                )
                axes.add_patch(frame)


def _name_groups(axes: Axes, found: Choices, cell: tuple[float, float]) -> float:
    """Name the groups beside and above a heat map; return the inches taken above it."""
    if not 1 < len({*found.target_groups, *found.sharer_groups}) <= MAX_LABELS:
        return 0.0
    look: dict[str, Any] = {"color": COLOR["ink-2"]}
    beside = len(found.sharers) - 0.5 + 0.08 / cell[0]
    for name, top, bottom in spans(found.target_groups):
        axes.text(beside, (top + bottom) / 2, _group_name(name), va="center", **look)
    across = [(_group_name(group), i, j) for group, i, j in spans(found.sharer_groups)]
    lengths = [len(name) * _INCHES for name, _, _ in across]
    flat = all(
        length < (last - first + 1) * cell[0]
        for length, (_, first, last) in zip(lengths, across, strict=True)
    )
    look |= {"ha": "center", "va": "bottom", "rotation": 0 if flat else 90}
    for name, left, right in across:
        axes.text((left + right) / 2, -0.5 - 0.06 / cell[1], name, **look)
    return 0.12 if flat else max(lengths)


def _group_name(group: str) -> str:
    return short(group) or "no group"
