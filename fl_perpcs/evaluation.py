"""How well a user's queries are answered with what is in the adapter slot."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fl_perpcs.config import EvaluationSection
from fl_perpcs.lm import LM
from fl_perpcs.prompts import Prompt
from fl_perpcs.ranking import rank
from fl_perpcs.tasks import Task
from fl_perpcs.tasks.metrics import score
from fl_perpcs.text import encode, encode_prompt, in_batches
from fl_perpcs.training import mean_loss, seeded


@dataclass(frozen=True)
class Evaluation:
    """A user's queries, answered.

    Attributes
    ----------
    predictions : list of str
        One for each query; empty without answers.
    metrics : dict of str to float
        ``loss`` (response loss, nats per token), ``tokens`` (response tokens), ``queries``,
        ``dropped`` (queries left out of the loss: a gold output leaves no room for the prompt)
        and, with answers, each of the task's metrics.
    """

    predictions: list[str]
    metrics: dict[str, float]


def evaluate(
    lm: LM,
    task: Task,
    prompts: Sequence[Prompt],
    golds: Sequence[str],
    how: EvaluationSection,
    *,
    max_length: int,
    seed: int,
) -> Evaluation:
    """Answer queries with the adapter in the slot and score the answers.

    Parameters
    ----------
    lm : LM
    task : Task
    prompts : sequence of Prompt
        Of the queries.
    golds : sequence of str
        Their gold outputs.
    how : EvaluationSection
    max_length : int
        Tokens of a prompt with its response.
    seed : int
        Of sampled answers.

    Returns
    -------
    Evaluation
        Queries whose gold output leaves no room for a prompt count for the metrics, not for
        the loss.

    Raises
    ------
    PerPcsError
        If labels are to be ranked and the task has none.
    """
    encoded = encode(prompts, golds, lm.tokenizer, max_length)
    metrics = {
        "loss": mean_loss(lm.model, in_batches(encoded, how.batch_size, lm.pad), lm.device),
        "tokens": sum(len(e.response) for e in encoded),
        "queries": len(prompts),
        "dropped": len(prompts) - len(encoded),
    }
    predictions = answer(lm, task, prompts, how, max_length=max_length, seed=seed)
    if predictions:
        for name in task.metrics:
            metrics[name] = score(name, predictions, golds, task.labels)
    return Evaluation(predictions, metrics)


def answer(
    lm: LM,
    task: Task,
    prompts: Sequence[Prompt],
    how: EvaluationSection,
    *,
    max_length: int,
    seed: int,
) -> list[str]:
    """Answer queries in the way that the config names, without looking at golds.

    Returns
    -------
    list of str
        One for each prompt, "" where it does not fit; empty with ``answers = "none"``.
    """
    if how.answers == "none":
        return []
    if how.answers == "rank":
        return rank(lm, task.labels, prompts, batch_size=how.batch_size, max_length=max_length)
    return generate(lm, task, prompts, how, max_length, seed)


def generate(
    lm: LM,
    task: Task,
    prompts: Sequence[Prompt],
    how: EvaluationSection,
    max_length: int,
    seed: int,
) -> list[str]:
    """Generate an answer to each prompt, in left-padded batches.

    Returns
    -------
    list of str
        Stripped, up to the first line break; "" where the prompt does not fit.
    """
    budget = max_length - task.max_new_tokens
    encoded = [encode_prompt(prompt, lm.tokenizer, budget) for prompt in prompts]
    fitting = [list(ids) for ids in encoded if ids]
    sampling = (
        {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
        if how.temperature > 0
        else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    )
    answers: list[str] = []
    with seeded(lm.device, seed):
        for start in range(0, len(fitting), how.batch_size):
            batch = lm.tokenizer.pad(
                {"input_ids": fitting[start : start + how.batch_size]},
                padding_side="left",
                return_tensors="pt",
            ).to(lm.device)
            width = batch["input_ids"].shape[1]
            with torch.inference_mode():
                output = lm.model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=task.max_new_tokens,
                    pad_token_id=lm.tokenizer.pad_token_id,
                    eos_token_id=lm.tokenizer.eos_token_id,
                    **sampling,
                )
            texts = lm.tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
            answers += [text.strip().split("\n")[0].strip() for text in texts]
    found = iter(answers)
    return [next(found) if ids else "" for ids in encoded]
