"""What a user does in each role, on its own data: the client's side of the algorithm."""

from typing import cast

import torch

from fl_perpcs.assembly import Recipe, assemble, cook
from fl_perpcs.config import FitSection
from fl_perpcs.evaluation import Evaluation, evaluate
from fl_perpcs.gates import train_gates
from fl_perpcs.lm import adapter_parameters, put_adapter, take_adapter
from fl_perpcs.node import Job
from fl_perpcs.pieces import Adapter, Piece, split
from fl_perpcs.pool import Stack
from fl_perpcs.selection import shared_sites
from fl_perpcs.text import Encoded, in_batches
from fl_perpcs.training import fit, mean_loss


def adapt(job: Job, adapter: Adapter, proximal_mu: float = 0.0) -> tuple[Adapter, float]:
    """Train the task adapter for one round on a base user's history, queries or both.

    Returns
    -------
    adapter : Adapter
    loss : float
        Mean training loss of the round.
    """
    losses = _train_from(
        job, adapter, job.config.adaptation, adaptation_examples(job)[0], proximal_mu
    )
    return take_adapter(job.lm), sum(losses) / len(losses)


def adaptation_examples(job: Job) -> tuple[list[Encoded], int]:
    """Return what a base user trains on, ``adaptation.examples``, and how many do not fit."""
    which = job.config.adaptation.examples
    encoded: list[Encoded] = []
    examples = 0
    if which != "queries":
        encoded += job.history
        examples += len(job.items)
    if which != "history":
        encoded += job.queries
        examples += len(job.user.queries)
    return encoded, examples - len(encoded)


def query_loss(job: Job, adapter: Adapter) -> tuple[float, int]:
    """Evaluate the task adapter on a base user's queries.

    Returns
    -------
    loss : float
        Response loss, nats per token.
    queries : int
        How many it is the loss of; 0 if none fits ``lm.max-length``.
    """
    put_adapter(job.lm, adapter)
    batches = in_batches(job.queries, job.config.evaluation.batch_size, job.pad)
    return mean_loss(job.lm.model, batches, job.lm.device), len(job.queries)


def train_adapter(job: Job) -> list[float]:
    """Train a user's own adapter on its history and leave it in the slot; return the losses.

    The same for sharers and for one adapter per user (OPPU, Tan et al., 2024), so that a
    target's reference differs from a sharer's adapter in nothing but the user.
    """
    return _train_from(job, job.start_adapter(), job.config.adapter, job.history)


def make_pieces(job: Job) -> tuple[list[Piece], dict[str, float]]:
    """Train an adapter and its gates, break it into pieces and draw those to share.

    Returns
    -------
    pieces : list of Piece
    metrics : dict of str to float
        Losses of the first and last steps.
    """
    adapter_losses = train_adapter(job)
    gates, gate_losses = train_gates(job.lm, job.history, job.config.gates, seed=job.seed("gates"))
    pieces = split(take_adapter(job.lm), gates)
    shared = set(
        shared_sites([p.site for p in pieces], job.config.sharers.ratio, job.seed("shared"))
    )
    metrics = {
        "adapter-loss-first": adapter_losses[0],
        "adapter-loss-last": adapter_losses[-1],
        "gate-loss-first": gate_losses[0],
        "gate-loss-last": gate_losses[-1],
    }
    return [piece for piece in pieces if piece.site in shared], metrics


def history_embedding(job: Job) -> torch.Tensor:
    """Return the mean over history items of the mean over tokens of the last hidden state.

    Returns
    -------
    Tensor
        (hidden size,), float32 on the CPU. The base LLM itself is the encoder.
    """
    decoder = cast(torch.nn.Module, job.lm.model.get_base_model().base_model)
    sums, count = torch.zeros(()), 0
    with torch.inference_mode():
        for batch in job.history_batches(job.config.assembly.batch_size):
            moved = batch.to(job.lm.device)
            hidden = decoder(
                input_ids=moved.input_ids, attention_mask=moved.attention_mask, use_cache=False
            ).last_hidden_state.float()
            mask = moved.attention_mask.unsqueeze(-1)
            sums = sums + ((hidden * mask).sum(1) / mask.sum(1)).sum(0).cpu()
            count += len(hidden)
    return sums / count


def assemble_from(job: Job, stacks: dict[str, Stack]) -> Recipe:
    """Assemble a target's adapter from the pool, leave it in the slot and return its recipe."""
    how = job.config.assembly
    batches = job.history_batches(how.batch_size, last=how.max_history)
    recipe = assemble(job.lm, stacks, batches, how, job.seed("assembly"))
    put_adapter(job.lm, cook(recipe, stacks, how.merge))
    return recipe


def answer_queries(job: Job) -> Evaluation:
    """Evaluate what is in the slot on the user's queries."""
    return evaluate(
        job.lm,
        job.source.task,
        job.query_prompts,
        [query.output for query in job.user.queries],
        job.config.evaluation,
        max_length=job.config.lm.max_length,
        seed=job.seed("answers"),
    )


def _train_from(
    job: Job,
    start: Adapter,
    settings: FitSection,
    encoded: list[Encoded],
    proximal_mu: float = 0.0,
) -> list[float]:
    """Train the adapter in the slot on some of the user's examples, from a given one."""
    put_adapter(job.lm, start)
    return fit(
        job.lm.model,
        adapter_parameters(job.lm),
        encoded,
        settings,
        pad=job.pad,
        seed=job.seed("adapter"),
        proximal_mu=proximal_mu,
    )
