"""Batched generation against batch 1: tokens per second and equal greedy answers.

    python benchmarks/generation.py smollm2-debian --queries 32 prompts.retrieve=2

The queries are those of the config's first users, with its retrieval and profile prompts, sorted
by nothing: a batch holds prompts of any length, as in a run. Both ways run in turn, several times,
in this process; the ratio is of the medians.
"""

import argparse
import json
import statistics
import time

import torch

from fl_perpcs.cli_words import read_config
from fl_perpcs.config import EvaluationSection
from fl_perpcs.data import open_source
from fl_perpcs.evaluation import generate
from fl_perpcs.lm import LM, load_lm
from fl_perpcs.prompts import Prompt, preamble_of, prompts_of_queries
from fl_perpcs.tasks import Task


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="+", help="CONFIG and KEY=VALUE, as for perpcs run")
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = read_config(args.words)
    lm = load_lm(config)
    source = open_source(config)
    prompts: list[Prompt] = []
    for user_id in source.user_ids():
        if len(prompts) >= args.queries:
            break
        user = source.user(user_id)
        preamble = preamble_of(config.prompts, user_id, lm.device)
        prompts += prompts_of_queries(user.queries, user.history, source.task, preamble)
    prompts = prompts[: args.queries]
    sizes = (1, args.batch_size)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    answers: dict[int, list[str]] = {}
    for _ in range(args.repeats):
        for size in sizes:
            took, answers[size] = timed(lm, source.task, prompts, config.lm.max_length, size)
            seconds[size].append(took)
    tokens = sum(len(lm.tokenizer(text)["input_ids"]) + 1 for text in answers[1])
    speed = {size: tokens / statistics.median(seconds[size]) for size in sizes}
    same = sum(a == b for a, b in zip(*answers.values(), strict=True))
    report = {
        "queries": len(prompts),
        "answer_tokens": tokens,
        "tokens_per_second": {str(size): round(value, 2) for size, value in speed.items()},
        "seconds": {str(size): [round(s, 2) for s in seconds[size]] for size in sizes},
        "ratio": round(speed[args.batch_size] / speed[1], 2),
        "same_answers": f"{same}/{len(prompts)}",
    }
    print(json.dumps(report, indent=1))


def timed(
    lm: LM, task: Task, prompts: list[Prompt], max_length: int, size: int
) -> tuple[float, list[str]]:
    """Answer all prompts greedily in batches of a size; return seconds and answers."""
    start = time.perf_counter()
    answers = generate(lm, task, prompts, EvaluationSection(batch_size=size), max_length, seed=0)
    return time.perf_counter() - start, answers


if __name__ == "__main__":
    main()
