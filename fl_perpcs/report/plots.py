"""The report's other figures: users' gains and popular sharers."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from fl_perpcs.config import REFERENCES
from fl_perpcs.report.drawing import COLOR, PERCENT, STYLE, bare, inline_svg, short
from fl_perpcs.report.facts import BASE, Choices, Scores, gains
from fl_perpcs.results import LOSS, lower_is_better

NAMES = {"base": "base LLM", "oppu": "OPPU"}


def method_name(method: str) -> str:
    """Return a method's name as it is printed; most go by the name they have."""
    return NAMES.get(method, method)


def gains_figure(found: Scores, methods: Sequence[str], metric: str, users: Sequence[str]) -> str:
    """Draw each user's gain over the base LLM, one mark per method.

    Parameters
    ----------
    found : Scores
        From :func:`fl_perpcs.report.facts.scores`.
    methods : sequence of str
        The evaluated methods; the base LLM is the zero line.
    metric : str
        The main metric; the loss has a panel of its own.
    users : sequence of str
        Users in the order that breaks ties.

    Returns
    -------
    str
        SVG, or nothing if no user was evaluated with the base LLM and another method.
    """
    wanted = list(dict.fromkeys((metric, LOSS)))
    tables = {name: {m: gains(found, m, name) for m in methods if m != BASE} for name in wanted}
    tables = {name: {m: own for m, own in t.items() if own} for name, t in tables.items()}
    tables = {name: table for name, table in tables.items() if table}
    if not tables:
        return ""
    shown = _by_gain([*tables.values()][-1], users)
    looks = _looks([m for m in methods if any(m in table for table in tables.values())])
    step = 0.2 if len(shown) <= 40 else 0.155
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, step * (len(shown) + 2)))
        panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
        figure.subplots_adjust(0, 0, 1, 1, wspace=0.06)
        for axes, (name, table) in zip(panels, tables.items(), strict=True):
            _gains_panel(axes, table, looks, shown)
            way = "fall" if lower_is_better(name) else "rise"
            what = "the loss per response token" if name == LOSS else name
            axes.set_xlabel(f"{way} of {what}")
        first = panels[0]
        names = ["mean", *(short(user) for user in shown)]
        first.set_yticks([-1.5, *range(len(shown))], names, fontsize=min(8, step * 45))
        first.set_ylim(len(shown) - 0.4, -2.1)
        first.legend(
            handles=[Line2D([], [], label=method_name(m), **look) for m, look in looks.items()],
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=min(5, len(looks)),
            borderaxespad=0.2,
            handletextpad=0.2,
            columnspacing=1.4,
        )
        return inline_svg(figure, "Gains of each target over the base LLM")


def _by_gain(table: Mapping[str, Mapping[str, float]], users: Sequence[str]) -> list[str]:
    """Return the users in a table, those first who gain most from the strategy's own method."""
    own = [method for method in table if method not in REFERENCES]
    leading = table[own[0]] if own else next(iter(table.values()))
    shown = [user for user in users if any(user in own for own in table.values())]
    return sorted(shown, key=lambda user: -leading.get(user, -np.inf))


def _looks(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return each method's mark: OPPU, the reference, is a ring that others may fill."""
    ring = {"color": COLOR["s2"], "marker": "o", "markersize": 6.5, "markerfacecolor": "none"}
    looks: dict[str, dict[str, Any]] = {}
    for slot, method in enumerate(method for method in methods if method != "oppu"):
        color = COLOR[("s1", "s3", "s4", "s5", "s6")[slot % 5]]
        looks[method] = {"color": color, "marker": "osD^vP*"[slot % 7], "markersize": 4.5}
    if "oppu" in methods:
        looks["oppu"] = ring
    return {m: {"linestyle": "none", "markeredgewidth": 1.3, **look} for m, look in looks.items()}


def _gains_panel(
    axes: Axes,
    table: Mapping[str, Mapping[str, float]],
    looks: Mapping[str, dict[str, Any]],
    users: Sequence[str],
) -> None:
    axes.axvline(0, color=COLOR["ink-2"], linewidth=1, zorder=1)
    axes.axhline(-0.75, color=COLOR["line"], linewidth=0.8, zorder=1)
    for row, user in enumerate(users):
        values = [own[user] for own in table.values() if user in own]
        if len(values) > 1:
            ends = [min(values), max(values)]
            axes.plot(ends, [row, row], color=COLOR["axis"], linewidth=1.4, zorder=2)
    for method, own in table.items():
        rows = [row for row, user in enumerate(users) if user in own]
        values = [own[users[row]] for row in rows]
        mean = sum(values) / len(values)
        axes.plot([*values, mean], [*rows, -1.5], zorder=3, **looks[method])
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.margins(x=0.06)
    bare(axes)


def hubs_figure(found: Choices) -> str:
    """Draw how often each sharer was first choice, over all targets and sites, as SVG."""
    counts, total = found.first.sum(axis=0), found.first.sum()
    own = (found.first * found.same_group).sum(axis=0) / total
    order = sorted(range(len(counts)), key=lambda index: (-counts[index], index))
    rest = (counts / total - own)[order]
    own = own[order]
    places = np.arange(len(order))
    step = min(0.45, max(0.12, 8.0 / len(order)))
    bars: dict[str, Any] = {"edgecolor": COLOR["surface"], "linewidth": 0.8, "width": 0.82}
    with matplotlib.rc_context(STYLE | {"font.size": 8}):
        figure = Figure(figsize=(max(3.2, step * len(order)), 2.4))
        axes = figure.add_axes((0, 0, 1, 1))
        if found.groups_differ:
            label = "by targets of its own group"
            axes.bar(places, own, color=COLOR["s1"], label=label, **bars)
            label = "by other targets"
            axes.bar(places, rest, bottom=own, color=COLOR["s2"], label=label, **bars)
            axes.legend(loc="upper right")
        else:
            axes.bar(places, own + rest, color=COLOR["s1"], **bars)
        even = 1 / len(order)
        axes.axhline(even, color=COLOR["ink-2"], linewidth=1, linestyle=(0, (4, 3)))
        axes.text(
            1.01,
            even,
            "even share",
            transform=blended_transform_factory(axes.transAxes, axes.transData),
            va="center",
            color=COLOR["ink-2"],
        )
        names = [short(found.sharers[index]) for index in order]
        axes.set_xticks(places, names, rotation=90, fontsize=min(8, step * 54))
        axes.set_xlim(-0.6, len(order) - 0.4)
        axes.set_ylabel("first choices")
        axes.yaxis.set_major_formatter(PERCENT)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.grid(axis="y")
        bare(axes)
        return inline_svg(figure, "How often each sharer was first choice")
