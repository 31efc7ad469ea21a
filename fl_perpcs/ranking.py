"""Answers by likelihood: each label is scored as the response, the likeliest is the answer.

A language model then always answers with a label, and is not judged by its way of writing.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fl_perpcs.errors import PerPcsError
from fl_perpcs.lm import LM
from fl_perpcs.prompts import Prompt
from fl_perpcs.text import encode_prompt, response_ids

Ids = Sequence[int]


def rank(
    lm: LM, labels: Sequence[str], prompts: Sequence[Prompt], *, batch_size: int, max_length: int
) -> list[str]:
    """Return the likeliest label after each prompt; the first of equals.

    Parameters
    ----------
    lm : LM
    labels : sequence of str
    prompts : sequence of Prompt
    batch_size : int
        Prompts scored together.
    max_length : int
        Tokens of a prompt with the longest label, as a response.

    Returns
    -------
    list of str
        "" where the prompt does not fit.

    Raises
    ------
    PerPcsError
        If there are no labels.
    """
    if not labels:
        raise PerPcsError("there are no labels to rank; generate the answers of this task")
    responses = [response_ids(label, lm.tokenizer) for label in labels]
    budget = max_length - max(map(len, responses))
    encoded = [encode_prompt(prompt, lm.tokenizer, budget) for prompt in prompts]
    fitting = [ids for ids in encoded if ids]
    best = [
        labels[index]
        for start in range(0, len(fitting), batch_size)
        # torch.max may take any of equals; the sort keeps their order.
        for index in label_scores(lm, fitting[start : start + batch_size], responses)
        .argsort(dim=1, descending=True, stable=True)[:, 0]
        .tolist()
    ]
    found = iter(best)
    return [next(found) if ids else "" for ids in encoded]


@torch.inference_mode()
def label_scores(lm: LM, prompts: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
    """Return the log-likelihood of each response after each prompt.

    The prompts run once, left-padded, and fill a cache; then only the tokens of one response
    after another run, on a copy of it. So the memory is that of generating for the batch.

    Parameters
    ----------
    lm : LM
    prompts, responses : sequence of sequence of int
        Token ids, none empty; a response ends with eos.

    Returns
    -------
    Tensor
        (prompts, responses), float32, in nats, on the CPU.
    """
    lm.model.eval()
    batch = lm.tokenizer.pad(
        {"input_ids": [list(ids) for ids in prompts]}, padding_side="left", return_tensors="pt"
    ).to(lm.device)
    cache = DynamicCache(config=lm.model.config)
    # The logits of the first token of every response.
    first = _forward(lm.model, batch["input_ids"], batch["attention_mask"], cache)[:, -1:]
    scores = []
    for response in responses:
        ids = torch.tensor(response, device=lm.device).repeat(len(prompts), 1)
        logits = [first]
        if len(response) > 1:
            mask = torch.cat([batch["attention_mask"], torch.ones_like(ids[:, :-1])], dim=1)
            logits.append(_forward(lm.model, ids[:, :-1], mask, copy.deepcopy(cache)))
        likelihoods = torch.cat(logits, dim=1).float().log_softmax(-1)
        scores.append(likelihoods.gather(2, ids.unsqueeze(2)).sum((1, 2)))
    return torch.stack(scores, dim=1).cpu()


def _forward(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Return the logits after the ids, which go on from a cache and are added to it.

    Parameters
    ----------
    ids : Tensor
        (batch, tokens).
    mask : Tensor
        (batch, cached + tokens), 0 at padding.
    cache : DynamicCache

    Returns
    -------
    Tensor
        (batch, tokens, vocabulary); with an empty cache (batch, 1, vocabulary), after the last.
    """
    known = inspect.signature(model.get_base_model().forward).parameters
    # transformers renamed it; families that count positions by the mask take no positions.
    options: dict[str, Any] = {"cache" if "cache" in known else "past_key_values": cache}
    if "position_ids" in known:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        options["position_ids"] = positions[:, -ids.shape[1] :]
    return model(
        input_ids=ids,
        attention_mask=mask,
        use_cache=True,
        logits_to_keep=0 if cache.get_seq_length() else 1,
        **options,
    ).logits
