"""Server memory with a large pool: bounded by the window, not by the targets.

    python benchmarks/large_pool.py --sharers 10000

A small federation makes a pool, which is blown up to the wanted number of sharers: each a real
sharer's pieces with noise of a tenth of their spread. Then few and many targets assemble from it
with each protocol, in Flower runs. The ServerApp writes down its memory with every message that
comes back: growth is from the first value while targets exchange to the largest, and at the end.
"""

import argparse
import json
from pathlib import Path

import torch

from fl_perpcs.launcher import launch
from fl_perpcs.pieces import Piece
from fl_perpcs.pool import Pool, load_pool, save_pool
from fl_perpcs.results import PREFIX
from fl_perpcs.runs import read_lines

COMMON = {
    "data.users": 100,
    "data.queries": 4,
    "evaluation.references": "",
    "evaluation.answers": "none",
    "evaluation.resamples": 0,
    "run.report": False,
    "run.name": "large-pool",
    "run.window": 4,
}
PROTOCOLS = {
    "server match": {"exchange.protocol": "server-match"},
    "one-shot": {"exchange.protocol": "one-shot"},
    "broadcast by reference": {"exchange.by-reference": True},
}
EXCHANGES = ("send", "ask", PREFIX)


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sharers", type=int, default=10_000)
    parser.add_argument("--targets", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--out", type=Path, default=Path("large-pool"))
    args = parser.parse_args()
    out = args.out.absolute()
    small, large = out / "small", out / f"pool-{args.sharers}"
    if not (small / "results.json").is_file():
        launch({**COMMON, "roles.targets": max(args.targets), "run.dir": str(small)})
    if not large.is_dir():
        save_pool(blown_up(load_pool(small / "pool"), args.sharers), large)
    rows = []
    for name, protocol in PROTOCOLS.items():
        for targets in args.targets:
            folder = out / f"{name.replace(' ', '-')}-{args.sharers}-{targets}"
            values = {
                **COMMON,
                **protocol,
                "roles.targets": targets,
                "sharers.pool": str(large),
                "sharers.count": args.sharers,
                "adaptation.mode": "load",
                "adaptation.adapter": str(small / "adaptation"),
                "run.dir": str(folder),
            }
            if not (folder / "results.json").is_file():
                launch(values)
            rows.append({"protocol": name, "targets": targets, **memory_of(folder)})
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"sharers": args.sharers, "rows": rows}, indent=1))


def blown_up(pool: Pool, sharers: int) -> Pool:
    """Return a pool of so many sharers, each another's pieces with noise."""
    generator = torch.Generator().manual_seed(0)
    models = [pool.pieces[name] for name in sorted(pool.pieces)]

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * x.std() * torch.randn(x.shape, generator=generator)

    large = Pool(pool.spec)
    for number in range(sharers):
        pieces = [
            Piece(p.site, noisy(p.A), noisy(p.B), noisy(p.gate))
            for p in models[number % len(models)]
        ]
        large.admit(f"sharer-{number:06d}", pieces, pool.fingerprint)
    return large


def memory_of(folder: Path) -> dict[str, float]:
    """Return megabytes: the server's at the start, its growth, the largest worker's."""
    events = [e for e in read_lines(folder / "events.jsonl") if e["event"] == "phase"]
    found = [e["memory"] for e in events if e["phase"].startswith(EXCHANGES)]
    workers = [row.get("memory", 0) for row in read_lines(folder / "workers.jsonl")]
    times = [e["time"] for e in events if e["phase"].startswith(EXCHANGES)]
    return {
        "server_mb": round(found[0] / 1e6),
        "growth_mb": round((max(found) - found[0]) / 1e6),
        "at_end_mb": round((found[-1] - found[0]) / 1e6),
        "worker_mb": round(max(workers) / 1e6),
        "seconds": round(times[-1] - times[0], 1),
    }


if __name__ == "__main__":
    main()
