"""Figures of a study, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter

from fl_perpcs.results import lower_is_better, titled

STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e0",
    "axes.axisbelow": True,
    "text.parse_math": False,
}
BLUE, ORANGE, GREY = "#2a78d6", "#d97706", "#8a8a85"

Row = Mapping[str, Any]


def quality_figure(rows: Sequence[Row], metrics: Sequence[str], baseline: str, path: Path) -> None:
    """Draw each method's value of some metrics with its 95 % interval, one panel for each."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.2 * len(metrics) + 2.4, 0.24 * len(rows) + 0.9))
        panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for axes, metric in zip(panels, metrics, strict=True):
            for place, row in enumerate(rows):
                found = row["scores"][metric]
                low, high = found["interval"]
                color = ORANGE if row["method"] == baseline else BLUE
                axes.plot([low, high], [place, place], color=color, linewidth=1.4)
                axes.plot(found["value"], place, "o", color=color, markersize=4.5)
                if row["method"] == baseline:
                    axes.axvline(found["value"], color=ORANGE, linewidth=0.8, linestyle=":")
            axes.set_xlabel(titled(metric))
            axes.grid(axis="y", visible=False)
        panels[0].set_yticks(range(len(rows)), [row["method"] for row in rows])
        panels[0].set_ylim(len(rows) - 0.5, -0.5)
        _save(figure, path)


def cost_figure(rows: Sequence[Row], metric: str, path: Path) -> None:
    """Draw the share of OPPU's gain against what a method costs each target."""
    panels = {
        "backward-examples": "examples back through the base LLM",
        "forward-examples": "examples forward through the base LLM",
        "stored-bytes": "bytes that the target stores",
    }
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2))
        drawn = figure.subplots(1, len(panels), sharey=True)
        for axes, (cost, label) in zip(drawn, panels.items(), strict=True):
            for number, row in enumerate(rows, start=1):
                gain = row["scores"][metric]["gain"]
                at = row["costs"][cost], gain
                axes.plot(*at, "o", color=BLUE, markersize=4)
                axes.annotate(
                    str(number), at, (3, 3), textcoords="offset points", fontsize=7, color="#444"
                )
            axes.set_xscale("symlog", linthresh=10)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.tick_params(axis="x", labelsize=7.5)
            axes.set_xlabel(label)
            axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        drawn[0].yaxis.set_major_formatter(PercentFormatter(1, 0))
        drawn[0].set_ylabel(f"share of OPPU's gain in {metric}")
        _numbered(figure, [row["method"] for row in rows], columns=4)
        _save(figure, path)


def pareto_figure(
    rows: Sequence[Row], ends: Sequence[Row], metrics: Sequence[str], path: Path
) -> None:
    """Draw quality against all bytes of a target's exchange; a line through what nobody beats.

    ``ends`` are the methods between which gains are told: dotted lines.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * len(metrics) + 0.4, 4.4))
        panels = figure.subplots(1, len(metrics), squeeze=False)[0]
        # A method that sends nothing is drawn at one byte.
        sent = [max(1.0, row["traffic"]["down"] + row["traffic"]["up"]) for row in rows]
        for axes, metric in zip(panels, metrics, strict=True):
            values = [row["scores"][metric]["value"] for row in rows]
            sign = -1 if lower_is_better(metric) else 1
            order = sorted(range(len(rows)), key=lambda i: (sent[i], -sign * values[i]))
            front: list[int] = []
            for i in order:
                if not front or sign * values[i] > sign * values[front[-1]]:
                    front.append(i)
            axes.step(
                [sent[i] for i in front],
                [values[i] for i in front],
                where="post",
                color=ORANGE,
                linewidth=1,
            )
            for i, (x, y) in enumerate(zip(sent, values, strict=True)):
                axes.plot(x, y, "o", color=ORANGE if i in front else BLUE, markersize=4)
                axes.annotate(str(i + 1), (x, y), (3, 3), textcoords="offset points", fontsize=6.5)
            for row in ends:
                level = row["scores"][metric]["value"]
                axes.axhline(level, color=GREY, linewidth=0.8, linestyle=":")
                axes.annotate(
                    row["method"],
                    (1, level),
                    (-2, 2),
                    xycoords=("axes fraction", "data"),
                    textcoords="offset points",
                    ha="right",
                    fontsize=6.5,
                    color=GREY,
                )
            axes.set_xscale("log")
            narrow = max(sent) < 300 * min(sent)
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
            axes.xaxis.set_major_formatter(EngFormatter("B"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel("bytes to and from a target")
            axes.set_ylabel(titled(metric))
        _numbered(figure, [row["method"] for row in rows], columns=3)
        _save(figure, path)


def plan_figure(sharers: Sequence[int], series: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw what a target exchanges against the number of sharers, by protocol."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.2, 3.4), layout="constrained")
        axes = figure.subplots()
        for (name, values), marker in zip(series.items(), "osv^D", strict=False):
            axes.plot(sharers, values, marker=marker, markersize=4, linewidth=1, label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(EngFormatter("B"))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("sharers")
        axes.set_ylabel("bytes to and from a target")
        axes.legend(frameon=False, fontsize=8)
        _save(figure, path)


def hubness_figure(
    choices: Mapping[str, Sequence[Mapping[str, float]]], notes: Mapping[str, str], path: Path
) -> None:
    """Draw how often each sharer is first choice, the most popular first, mean over seeds.

    Parameters
    ----------
    choices : mapping of str to sequence of dict
        For each way to score, for each seed, sharer to its share of first choices.
    notes : mapping of str to str
        A line under the name of each.
    path : Path
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.5 * len(choices), 2.9))
        panels = figure.subplots(1, len(choices), sharey=True, squeeze=False)[0]
        for axes, (name, seeds) in zip(panels, choices.items(), strict=True):
            most = max(map(len, seeds))
            ranked = np.zeros((len(seeds), most))
            for place, found in enumerate(seeds):
                ranked[place, : len(found)] = sorted(found.values(), reverse=True)
            axes.bar(range(1, most + 1), ranked.mean(axis=0), color=BLUE, width=0.8)
            axes.axhline(1 / most, color=ORANGE, linewidth=1, linestyle=":")
            axes.set_title(f"{name}\n{notes.get(name, '')}", fontsize=8.5)
            axes.set_xlabel("sharers, the most popular first")
            axes.grid(axis="x", visible=False)
        panels[0].set_ylabel("share of first choices")
        panels[0].yaxis.set_major_formatter(PercentFormatter(1, 0))
        _save(figure, path)


def ablation_figure(
    title: str, values: Sequence[Any], rows: Sequence[Row], metric: str, path: Path
) -> None:
    """Draw the loss and the main metric against the values of one key."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.4), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, name in zip(panels, ("loss", metric), strict=True):
            _errors(axes, [row["scores"][name] for row in rows])
            axes.set_xticks(range(len(values)), [str(value) for value in values])
            axes.set_xlabel(title)
            axes.set_ylabel(titled(name))
            axes.grid(axis="x", visible=False)
        _save(figure, path)


def _numbered(figure: Figure, names: Sequence[str], columns: int) -> None:
    """Write what numbers in a figure stand for below it, in columns."""
    lines = [f"{number} {name}" for number, name in enumerate(names, start=1)]
    length = -(-len(lines) // columns)
    for column in range(columns):
        part = "\n".join(lines[column * length : (column + 1) * length])
        figure.text(0.06 + 0.94 * column / columns, -0.02, part, va="top", fontsize=7.5)


def _errors(axes: Axes, found: Sequence[Mapping[str, Any]]) -> None:
    values = np.array([score["value"] for score in found])
    ends = np.array([score["interval"] for score in found])
    around = np.abs(ends.T - values)
    axes.errorbar(range(len(values)), values, around, fmt="o-", color=BLUE, capsize=3, linewidth=1)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(
        temporary, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None}
    )
    temporary.replace(path)
