"""A study's table, as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from fl_perpcs.results import LOSS, titled

Row = Mapping[str, Any]

_UNITS = (" B", " kB", " MB", " GB", " TB")


def comparison_table(rows: Sequence[Row], metric: str) -> str:
    """Return methods down, and across: metric and loss with 95 % intervals, gains and costs."""
    names = list(dict.fromkeys((LOSS, metric)))
    heads = ["method"]
    for name in names:
        heads += [titled(name), f"{name}: share of OPPU's gain"]
    heads += ["trained numbers", "examples back", "examples forward", "stored bytes"]
    lines = [_line(heads), _line(["---"] + ["---:"] * (len(heads) - 1))]
    for row in rows:
        cells = [str(row["method"])]
        for name in names:
            found = row["scores"][name]
            cells.append(f"{found['value']:.3f} {_range(found['interval'])}")
            gain = found["gain"]
            cells.append(
                "" if gain is None else f"{_percent(gain)} {_percents(found['gain_interval'])}"
            )
        costs = row["costs"]
        cells += [
            f"{costs[cost]:,.0f}"
            for cost in (
                "trained-parameters",
                "backward-examples",
                "forward-examples",
                "stored-bytes",
            )
        ]
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def traffic_table(rows: Sequence[Row], metric: str) -> str:
    """Return methods down, and across: bytes of a target and a sharer, and quality."""
    names = list(dict.fromkeys((LOSS, metric)))
    heads = ["method", "to a target", "from a target", "round trips", "as serialized"]
    heads += ["stored", "from a sharer", "to a sharer"]
    for name in names:
        heads += [titled(name), f"{name}: share of OPPU's gain"]
    heads.append("formula off by")
    lines = [_line(heads), _line(["---"] + ["---:"] * (len(heads) - 1))]
    for row in rows:
        traffic = row["traffic"]
        cells = [str(row["method"]), si_bytes(traffic["down"]), si_bytes(traffic["up"])]
        cells += [f"{traffic['round-trips']:g}", si_bytes(traffic["wire"])]
        cells.append(si_bytes(row["costs"]["stored-bytes"]))
        cells += [si_bytes(traffic["shared"]), si_bytes(traffic["received"])]
        for name in names:
            found = row["scores"][name]
            cells.append(f"{found['value']:.3f}")
            cells.append("" if found["gain"] is None else _percent(found["gain"]))
        cells.append(f"{100 * traffic['off']:.2f} %")
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a table whose first columns are words and the others numbers."""
    ruler = ["---"] * words + ["---:"] * (len(heads) - words)
    return "\n".join(map(_line, [heads, ruler, *rows])) + "\n"


def seconds(count: float) -> str:
    """Return a time in seconds, minutes or hours, with two digits."""
    for unit, size in (("h", 3600), ("min", 60)):
        if count >= 2 * size:
            return (
                f"{count / size:,.0f} {unit}"
                if count >= 10 * size
                else f"{count / size:.1f} {unit}"
            )
    return f"{count:.0f} s" if count >= 10 else f"{count:.1f} s"


def si_bytes(count: float) -> str:
    """Return bytes with three digits and a unit: 12.3 kB."""
    power = min((len(str(round(count))) - 1) // 3, 4)
    number = count / 1000**power
    return (f"{number:.0f}" if number >= 100 else f"{number:.3g}") + _UNITS[power]


def rival_table(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """Return methods down and rivals across: paired differences, and units served better."""
    rivals = list(rows[0]["scores"][metrics[0]]["against"])
    heads = [f"{metric} against {rival}" for metric in metrics for rival in rivals]
    lines = [_line(["method", *heads]), _line(["---"] + ["---:"] * len(heads))]
    for row in rows:
        cells = [str(row["method"])]
        for metric in metrics:
            for rival, found in row["scores"][metric]["against"].items():
                own = rival == row["method"]
                cells.append("" if own else f"{_signed(found)}, {found['better']}/{row['units']}")
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _range(ends: Sequence[float]) -> str:
    return f"[{ends[0]:.3f}, {ends[1]:.3f}]"


def _signed(found: Mapping[str, Any]) -> str:
    low, high = found["interval"]
    return f"{found['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"


def _percents(ends: Sequence[float]) -> str:
    return f"[{_percent(ends[0])}, {_percent(ends[1])}]"


def _percent(share: float) -> str:
    return f"{round(100 * share)} %"
