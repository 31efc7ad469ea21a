"""How much memory and time a large LaMP file takes: index it, then read users from it.

Writes a LaMP-2M file of realistic shape into a temporary folder, indexes it in a child process
and, in another child with a warm index, reads the history of many users. Prints JSON.

    python benchmarks/lamp_index.py [--megabytes 500] [--reads 300]
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAGS = ("sci-fi", "comedy", "classic", "dystopia", "romance", "violence", "true story")
TEXT = (
    "when a young woman returns to her home town she finds that the past is not over and an old"
    " friend needs help with a plan that could change everything for the people who live there"
    ' café naïve Zoë Þórr 東京 映画 Москва фильм señor über 🎬 “quoted” \\ "inside"'
)
WORDS = TEXT.split()


def description(rng: random.Random) -> str:
    """Return the text of an item, about 90 words."""
    return " ".join(rng.choices(WORDS, k=max(5, round(rng.gauss(92, 22)))))


def questions(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield questions of users with very different profiles, several of them for each."""
    number = item = 0
    while True:
        size = min(2000, max(1, round(rng.lognormvariate(3.6, 1.1))))
        profile = []
        for _ in range(size):
            item += 1
            tag = rng.choice(TAGS)
            profile.append({"tag": tag, "description": description(rng), "id": str(item)})
        for _ in range(rng.randint(1, 4)):
            text = (
                "Which tag does this movie relate to among the following tags? Just answer with"
                " the tag name without further explanation."
                f" tags: [{', '.join(TAGS)}] description: {description(rng)}"
            )
            yield {"id": str(number), "input": text, "profile": profile}
            number += 1


def write_files(folder: Path, size: int) -> dict[str, int]:
    """Write questions and outputs; every other record has its characters escaped."""
    rng = random.Random(0)
    ids: list[str] = []
    with (folder / "train_questions.json").open("w", encoding="utf-8") as file:
        file.write("[")
        for record in questions(rng):
            escaped = len(ids) % 2 == 0
            file.write((", " if ids else "") + json.dumps(record, ensure_ascii=escaped))
            ids.append(record["id"])
            if file.tell() > size:
                break
        file.write("]")
    golds = [{"id": each, "output": rng.choice(TAGS)} for each in ids]
    (folder / "train_outputs.json").write_text(json.dumps({"task": "LaMP_2", "golds": golds}))
    return {"questions": len(ids), "bytes": (folder / "train_questions.json").stat().st_size}


def measure(folder: Path, reads: int) -> dict[str, Any]:
    """Open the source and read users; to be run in a process of its own."""
    from fl_perpcs.data.lamp import Lamp

    begin = time.perf_counter()
    source = Lamp(folder, "lamp-2m", split="train", queries=0)
    opened = time.perf_counter() - begin
    ids = source.user_ids()
    times = []
    items = []
    for user_id in random.Random(1).sample(ids, min(reads, len(ids))):
        begin = time.perf_counter()
        user = source.user(user_id)
        times.append(1000 * (time.perf_counter() - begin))
        items.append(len(user.history))
    times.sort()
    found: dict[str, Any] = {
        "users": len(ids),
        "open_s": round(opened, 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    if times:
        found |= {
            "reads": len(times),
            "most_items": max(items),
            "read_ms_p50": round(times[len(times) // 2], 2),
            "read_ms_p95": round(times[int(len(times) * 0.95)], 2),
            "read_ms_max": round(times[-1], 2),
        }
    return found


def child(folder: Path, home: Path, reads: int) -> dict[str, Any]:
    """Return what :func:`measure` finds in a new process."""
    command = [sys.executable, __file__, "--measure", str(folder), "--reads", str(reads)]
    environment = {**os.environ, "PERPCS_HOME": str(home)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--reads", type=int, default=300)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.reads)))
        return
    with tempfile.TemporaryDirectory(prefix="perpcs-benchmark-") as name:
        folder = Path(name) / "lamp-2m"
        folder.mkdir()
        file = write_files(folder, options.megabytes * 10**6)
        found = {
            "file": file,
            "cold (no index)": child(folder, Path(name), 0),
            "warm (index on disk)": child(folder, Path(name), options.reads),
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
