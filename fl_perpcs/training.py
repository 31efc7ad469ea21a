"""The one fine-tuning loop: adaptation, sharers' adapters, gates and the reference use it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import get_scheduler

from fl_perpcs.config import FitSection
from fl_perpcs.errors import PerPcsError
from fl_perpcs.text import IGNORE, Batch, Encoded, collate

BETAS = (0.9, 0.95)
"""AdamW's betas, as published."""


def response_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """Return the summed negative log-likelihood of the response tokens, and their number.

    Parameters
    ----------
    model : transformers.PreTrainedModel or peft.PeftModel
    batch : Batch

    Returns
    -------
    loss : Tensor
        Scalar, in nats.
    tokens : int
    """
    # Logits are only computed where some example predicts a response token: for a small
    # model with a large vocabulary the head is a good part of the cost.
    positions = batch.predicts_response.any(dim=0).nonzero().squeeze(1)
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        logits_to_keep=positions,
        use_cache=False,
    ).logits
    following = batch.labels[:, positions + 1]
    loss = cross_entropy(
        logits.float().flatten(0, 1), following.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return loss, int((following != IGNORE).sum())


def fit(
    model: Any,
    parameters: Sequence[torch.nn.Parameter],
    encoded: Sequence[Encoded],
    settings: FitSection,
    *,
    pad: int,
    seed: int,
    proximal_mu: float = 0.0,
) -> list[float]:
    """Minimize the mean response loss over some parameters, in place.

    Parameters
    ----------
    model : transformers.PreTrainedModel or peft.PeftModel
        Everything but ``parameters`` stays as it is.
    parameters : sequence of Parameter
        What is trained.
    encoded : sequence of Encoded
        The examples; each is seen once before any is seen again.
    settings : FitSection
    pad : int
        The padding token's id.
    seed : int
        Of the order of the examples and of dropout.
    proximal_mu : float
        Weight μ of ½μ‖w - w₀‖² (FedProx, Li et al., 2020).

    Returns
    -------
    list of float
        The mean response loss of each step, in nats per token.

    Raises
    ------
    PerPcsError
        If there are no examples, or the loss is not finite.
    """
    if not encoded:
        raise PerPcsError(
            "no example is left to train on: every one is longer than lm.max-length; raise it"
        )
    device = parameters[0].device
    start = [p.detach().clone() for p in parameters] if proximal_mu else []
    optimizer, schedule = optimizer_of(parameters, settings)
    losses = []
    with only_training(model, parameters), seeded(device, seed):
        stream = _batches(encoded, settings.batch_size, pad, seed)
        for _ in range(settings.steps):
            step_loss = 0.0
            for _ in range(settings.accumulate):
                loss, tokens = response_loss(model, next(stream).to(device))
                loss = loss / tokens / settings.accumulate
                loss.backward()
                step_loss += loss.item()
            if start:
                _add_proximal_gradient(parameters, start, proximal_mu)
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
            if not torch.isfinite(norm):
                raise PerPcsError(
                    f"the training loss became {step_loss} with lr = {settings.lr}; lower the lr"
                )
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(step_loss)
    return losses


def optimizer_of(
    parameters: Sequence[torch.nn.Parameter], settings: FitSection
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return the optimizer of a training job and the schedule of its learning rate."""
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.lr, betas=BETAS, weight_decay=settings.weight_decay
    )
    optimizer.zero_grad()  # an earlier fit may have failed half-way
    schedule = get_scheduler(
        settings.schedule, optimizer, num_warmup_steps=0, num_training_steps=settings.steps
    )
    return optimizer, schedule


def mean_loss(model: Any, batches: Sequence[Batch], device: torch.device) -> float:
    """Return the response loss per token over batches, in nats; 0 over no batch."""
    total, count = 0.0, 0
    model.eval()
    with torch.inference_mode():
        for batch in batches:
            loss, tokens = response_loss(model, batch.to(device))
            total, count = total + loss.item(), count + tokens
    return total / max(count, 1)


def _batches(encoded: Sequence[Encoded], size: int, pad: int, seed: int) -> Iterator[Batch]:
    """Yield batches without end, from one permutation of the examples after another."""
    generator = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    size = min(size, len(encoded))
    while True:
        while len(queue) < size:
            queue += torch.randperm(len(encoded), generator=generator).tolist()
        yield collate([encoded[i] for i in queue[:size]], pad)
        queue = queue[size:]


def _add_proximal_gradient(
    parameters: Sequence[torch.nn.Parameter], start: Sequence[Tensor], mu: float
) -> None:
    with torch.no_grad():
        for parameter, origin in zip(parameters, start, strict=True):
            if parameter.grad is not None:
                parameter.grad += mu * (parameter - origin)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's global generators of the CPU and a device, and put them back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def only_training(model: Any, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Let gradients reach these parameters alone, and leave the model as it was."""
    others = [p for p in model.parameters() if p.requires_grad]
    for parameter in others:
        parameter.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    model.train()
    try:
        yield
    finally:
        model.eval()
        for parameter in parameters:
            parameter.requires_grad_(False)
        for parameter in others:
            parameter.requires_grad_(True)
