"""What a user does in each role, on its own data: the client's side of the algorithm."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn.functional import cosine_similarity

from fl_perpcs.assembly import Recipe, cook, history_queries, make_recipe, search_weights, whole
from fl_perpcs.config import FitSection
from fl_perpcs.evaluation import Evaluation, evaluate
from fl_perpcs.gates import train_gates
from fl_perpcs.lm import adapter_parameters, decoder_of, put_adapter, take_adapter
from fl_perpcs.node import Job
from fl_perpcs.pieces import Adapter, Piece, split
from fl_perpcs.pool import Stack
from fl_perpcs.seeds import assembly_seed
from fl_perpcs.selection import shared_sites
from fl_perpcs.text import Encoded, in_batches
from fl_perpcs.training import fit, mean_loss

Fit = Callable[..., list[float]]
""":func:`fl_perpcs.training.fit`, or something with its signature."""


def adapt(job: Job, adapter: Adapter, proximal_mu: float = 0.0) -> tuple[Adapter, float]:
    """Train the task adapter for one round on a base user's history, queries or both.

    Returns
    -------
    adapter : Adapter
    loss : float
        Mean training loss of the round.
    """
    losses = _train_from(
        job,
        adapter,
        job.config.adaptation,
        adaptation_examples(job)[0],
        fit_by=partial(fit, proximal_mu=proximal_mu),
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


def train_adapter(job: Job, fit_by: Fit = fit) -> list[float]:
    """Train a user's own adapter on its history and leave it in the slot; return the losses.

    The same for sharers and for one adapter per user (OPPU, Tan et al., 2024), so that a
    target's reference differs from a sharer's adapter in nothing but the user.
    """
    start = job.start_adapter()
    return _train_from(job, start, job.config.adapter, job.history, fit_by=fit_by)


def make_pieces(job: Job) -> tuple[list[Piece], dict[str, float]]:
    """Train an adapter and its gates, break it into pieces and draw those to share.

    Returns
    -------
    pieces : list of Piece
    metrics : dict of str to float
        Losses of the first and last steps; with ``privacy.epsilon`` what was spent in their
        place, as losses would tell of the history.
    """
    fit_by, facts = _private_fit(job) if job.config.privacy.epsilon else (fit, {})
    adapter_losses = train_adapter(job, fit_by)
    gates, gate_losses = train_gates(
        job.lm, job.history, job.config.gates, seed=job.seed("gates"), fit_by=fit_by
    )
    pieces = split(take_adapter(job.lm), gates)
    shared = set(
        shared_sites([p.site for p in pieces], job.config.sharers.ratio, job.seed("shared"))
    )
    metrics = facts or {
        "adapter-loss-first": adapter_losses[0],
        "adapter-loss-last": adapter_losses[-1],
        "gate-loss-first": gate_losses[0],
        "gate-loss-last": gate_losses[-1],
    }
    return [piece for piece in pieces if piece.site in shared], metrics


def _private_fit(job: Job) -> tuple[Fit, dict[str, float]]:
    """Return how a sharer trains privately, and what it spends."""
    # Here, as few runs need Opacus.
    from fl_perpcs.privacy.dp_sgd import fit_privately, plan_privacy

    job.history_batches(1)  # tells if no item is left
    config = job.config
    plan = plan_privacy(len(job.history), config.adapter, config.gates, config.privacy)
    return partial(fit_privately, plan=plan), plan.facts


def history_embedding(job: Job) -> torch.Tensor:
    """Return the mean over history items of the mean over tokens of the last hidden state.

    Returns
    -------
    Tensor
        (hidden size,), float32 on the CPU. The base LLM itself is the encoder.
    """
    decoder = decoder_of(job.lm.model)
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


def site_queries(job: Job) -> dict[str, torch.Tensor]:
    """Return each site's query over the user's history, (d_in,), from the base LLM."""
    return history_queries(job.lm, job.history_batches(job.config.assembly.batch_size))


def assemble_from(
    job: Job, stacks: Mapping[str, Stack], population: Mapping[str, torch.Tensor] | None = None
) -> tuple[Recipe, int]:
    """Assemble a target's adapter from the pool and leave it in the slot.

    Returns
    -------
    recipe : Recipe
        What the adapter was made from; after ``tuning`` it is more than that.
    trained : int
        How many numbers were trained: 0 unless mixing or the adapter is.
    """
    job.history_batches(1)  # tells if no item is left
    seed = assembly_seed(job.config.seed, job.user.id)
    recipe, trained = make_recipe(job.lm, stacks, job.history, job.config, seed, population)
    return recipe, trained + settle(job, cook(recipe, stacks, job.config.assembly.merge))


def settle(job: Job, adapter: Adapter) -> int:
    """Put an assembled adapter into the slot and fine-tune it as far as ``tuning`` says.

    Returns
    -------
    int
        How many numbers were trained.
    """
    if (factors := job.config.tuning.factors) == "none":
        put_adapter(job.lm, adapter)
        return 0
    _train_from(job, adapter, job.config.tuning, job.history, factors=factors)
    return trained_numbers(job, factors)


def nearest_sharer(job: Job, embeddings: Mapping[str, torch.Tensor]) -> str:
    """Return the sharer with the most similar history.

    Similarity is the cosine of history embeddings, taken from their mean over the sharers:
    hidden states of one LM all point the same way otherwise.
    """
    own = history_embedding(job)
    names = sorted(embeddings)
    others = torch.stack([embeddings[name] for name in names])
    mean = others.mean(dim=0)
    similarity = cosine_similarity(others - mean, own - mean, dim=1)
    return names[int(similarity.argmax())]


def search_adapter(job: Job, stacks: Mapping[str, Stack]) -> Recipe:
    """Search for weights of whole adapters (LoRAHub) and put their sum into the slot."""
    how = job.config.lorahub
    batches = job.history_batches(job.config.assembly.batch_size, last=how.items)
    merge = job.config.assembly.merge
    weights = search_weights(job.lm, stacks, batches, how, merge, job.seed("lorahub"))
    recipe = whole(weights, stacks)
    put_adapter(job.lm, cook(recipe, stacks, merge))
    return recipe


def train_given(job: Job, adapter: Adapter, factors: str) -> int:
    """Fine-tune a given adapter, or one of its factors, as the user would train its own.

    Returns
    -------
    int
        How many numbers were trained.
    """
    _train_from(job, adapter, job.config.adapter, job.history, factors=factors)
    return trained_numbers(job, factors)


def train_round(job: Job, adapter: Adapter, factors: str) -> tuple[Adapter, float]:
    """Train an adapter, or one of its factors, for a round of averaging.

    Returns
    -------
    adapter : Adapter
    loss : float
        Mean training loss of the round.
    """
    losses = _train_from(job, adapter, job.config.averaging, job.history, factors=factors)
    return take_adapter(job.lm), sum(losses) / len(losses)


def trained_numbers(job: Job, factors: str = "AB") -> int:
    """Return how many numbers the slot's factors have."""
    return sum(p.numel() for p in adapter_parameters(job.lm, factors))


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
    factors: str = "AB",
    fit_by: Fit = fit,
) -> list[float]:
    """Train the adapter in the slot on some of the user's examples, from a given one."""
    put_adapter(job.lm, start)
    return fit_by(
        job.lm.model,
        adapter_parameters(job.lm, factors),
        encoded,
        settings,
        pad=job.pad,
        seed=job.seed("adapter"),
    )
