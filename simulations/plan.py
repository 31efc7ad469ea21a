"""What a federation that nobody has run would send: ``python -m simulations.plan``.

Closed forms only, which the study of communication checks against ledgers: bytes and round trips of
one target by protocol and wire format, for LLMs, numbers of sharers and links of any size.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fl_perpcs.config import Config, load_config
from fl_perpcs.exchange.costs import Cost
from fl_perpcs.runs import write_atomically
from simulations.drawing import plan_figure
from simulations.tables import markdown_table, seconds, si_bytes
from simulations.traffic import Facts, expected

LLMS = {
    "Llama-2-7B": (32, 4096, 4096),
    "Llama-2-13B": (40, 5120, 5120),
    "Llama-3.1-70B": (80, 8192, 1024),
}
"""Decoder layers, hidden size, and width of k and v (fewer heads share them in the last)."""
PROTOCOLS = {
    "broadcast": {},
    "layerwise": {"exchange.protocol": "layerwise"},
    "one-shot": {"exchange.protocol": "one-shot"},
    "server match by stages": {"exchange.protocol": "server-match", "exchange.match": "by-stages"},
    "server match": {"exchange.protocol": "server-match"},
}
FORMATS = ("float32", "bfloat16", "int8")
SHARERS = (50, 500, 5_000, 50_000, 100_000)
LINKS = {"1 Mbit/s": 1e6, "10 Mbit/s": 1e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}


def main(
    out: Annotated[Path, typer.Option(help="Folder of plan.md and plan.png.")] = Path(
        "studies/plan"
    ),
    rank: Annotated[int, typer.Option(help="r of the pieces.")] = 8,
    history: Annotated[int, typer.Option(help="History items of a target.")] = 100,
    batch: Annotated[int, typer.Option(help="Items that choose together.")] = 8,
    top_k: Annotated[int, typer.Option(help="Pieces chosen at each site by each batch.")] = 3,
    latency: Annotated[
        float, typer.Option(help="Seconds of a round trip without its bytes.")
    ] = 0.05,
) -> None:
    """Write tables and a figure of what targets would exchange."""
    how = {"lora.rank": rank, "assembly.batch-size": batch, "assembly.top-k": top_k}
    text = "\n".join(
        [
            f"Rank {rank}, q, k, v and o, {history} history items in batches of {batch},"
            f" top-{top_k}. Bytes are of one target, both ways, without the base LLM's"
            " adaptation. Where they depend on which pieces the batches choose: from all batches"
            f" choosing the same {top_k} to no two the same.\n",
            "## Llama-2-7B, 50 sharers\n",
            _formats_table(how, history, latency),
            "## float32, by LLM and sharers\n",
            _sharers_table(how, history),
            "## Llama-2-7B, 50 sharers, float32, time on the link"
            f" ({1000 * latency:g} ms a round trip)\n",
            _links_table(how, history, latency),
        ]
    )
    write_atomically(out / "plan.md", text)
    series = {
        name: [sum(_range(_cost(how | p, "Llama-2-7B", n, history))) / 2 for n in SHARERS]
        for name, p in PROTOCOLS.items()
    }
    plan_figure(SHARERS, series, out / "plan.png")
    typer.echo(text)
    typer.echo(f"written: {out}")


def planned(config: Config, llm: str, sharers: int, history: int) -> tuple[Cost, Cost]:
    """Return the least and the most that one target exchanges.

    Parameters
    ----------
    config : Config
        Of Per-Pcs.
    llm : str
        One of :data:`LLMS`.
    sharers : int
        Each shares all its pieces.
    history : int
        History items of the target.
    """
    layers, hidden, narrow = LLMS[llm]
    widths = {"q": hidden, "k": narrow, "v": narrow, "o": hidden}
    shapes = {
        f"model.layers.{layer}.self_attn.{name}_proj": (hidden, width)
        for layer in range(layers)
        for name, width in widths.items()
    }
    batches = -(-history // config.assembly.batch_size)
    least = min(sharers, config.assembly.top_k)
    most = min(sharers, config.assembly.top_k * batches)
    facts = Facts(shapes, 0, 0, sharers, 1, dict.fromkeys(shapes, sharers), {}, batches)
    ends = [replace(facts, asked=dict.fromkeys(shapes, asked)) for asked in (least, most)]
    few, many = (expected(config, end)["targets"] for end in ends)
    return few, many


def _cost(values: dict[str, int | str], llm: str, sharers: int, history: int) -> tuple[Cost, Cost]:
    # Nothing of the adaptation is in a plan.
    config = load_config({**values, "adaptation.mode": "none", "roles.base": 0})
    return planned(config, llm, sharers, history)


def _range(ends: tuple[Cost, Cost]) -> tuple[float, float]:
    return ends[0].down + ends[0].up, ends[1].down + ends[1].up


def _told(ends: tuple[Cost, Cost]) -> str:
    few, many = map(si_bytes, _range(ends))
    return few if few == many else f"{few} to {many}"


def _formats_table(how: dict[str, int], history: int, latency: float) -> str:
    rows = []
    for name, protocol in PROTOCOLS.items():
        found = [
            _cost({**how, **protocol, "exchange.format": f}, "Llama-2-7B", 50, history)
            for f in FORMATS
        ]
        rows.append([name, str(found[0][0].round_trips), *map(_told, found)])
    return markdown_table(["protocol", "round trips", *FORMATS], rows)


def _sharers_table(how: dict[str, int], history: int) -> str:
    rows = [
        [llm, name, *(_told(_cost({**how, **p}, llm, n, history)) for n in SHARERS)]
        for llm in LLMS
        for name, p in PROTOCOLS.items()
    ]
    return markdown_table(["LLM", "protocol", *(f"{n:,} sharers" for n in SHARERS)], rows, words=2)


def _links_table(how: dict[str, int], history: int, latency: float) -> str:
    rows = []
    for name, protocol in PROTOCOLS.items():
        ends = _cost({**how, **protocol}, "Llama-2-7B", 50, history)
        cells = []
        for bits in LINKS.values():
            few, many = (
                seconds(8 * sent / bits + latency * ends[0].round_trips) for sent in _range(ends)
            )
            cells.append(few if few == many else f"{few} to {many}")
        rows.append([name, *cells])
    return markdown_table(["protocol", *LINKS], rows)


if __name__ == "__main__":
    typer.run(main)
