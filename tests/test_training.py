"""The one fine-tuning loop."""

import pytest
import torch

from fl_perpcs import training
from fl_perpcs.config import FitSection
from fl_perpcs.errors import PerPcsError
from fl_perpcs.lm import adapter_parameters, initial_adapter, put_adapter, shapes_of, take_adapter
from fl_perpcs.text import Encoded, collate, in_batches
from fl_perpcs.training import fit, mean_loss, response_loss

PAD = 0
HISTORY = [
    Encoded((50, 60, 70, 80, 90), (100, 110, 1)),
    Encoded((120, 130), (140, 1)),
    Encoded((50, 90, 90, 95), (110, 300, 400, 1)),
    Encoded((500, 501, 502), (600, 1)),
]
EVEN = [Encoded((50 + i, 60 + i, 70), (100 + i, 1)) for i in range(8)]


def section(**options) -> FitSection:
    return FitSection(**{"lr": 0.02, "steps": 4, "batch_size": 2, **options})


def start(lm, seed: int = 0):
    put_adapter(lm, initial_adapter(shapes_of(lm), 2, seed))
    return adapter_parameters(lm)


def train(lm, encoded=HISTORY, seed: int = 0, proximal_mu: float = 0.0, **options) -> list[float]:
    return fit(
        lm.model,
        start(lm),
        encoded,
        section(**options),
        pad=PAD,
        seed=seed,
        proximal_mu=proximal_mu,
    )


def flat(lm) -> torch.Tensor:
    return torch.cat([t.flatten() for factors in take_adapter(lm).values() for t in factors])


def state_bytes(lm) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in lm.model.state_dict().items()}


def test_the_loss_falls(lm):
    losses = train(lm, steps=30, batch_size=4)
    assert len(losses) == 30
    assert losses[-1] < 0.8 * losses[0]
    batches = in_batches(HISTORY, 4, PAD)
    after = mean_loss(lm.model, batches, lm.device)
    start(lm)
    before = mean_loss(lm.model, batches, lm.device)
    assert before == pytest.approx(losses[0], abs=1e-4)
    assert after < 0.8 * before


def test_the_losses_are_those_before_each_step(lm):
    losses = train(lm, steps=1, batch_size=4)
    start(lm)
    assert losses == pytest.approx([mean_loss(lm.model, in_batches(HISTORY, 4, PAD), lm.device)])


def test_only_the_given_parameters_change(lm):
    parameters = start(lm)
    chosen = parameters[:2]
    before = state_bytes(lm)
    fit(lm.model, chosen, HISTORY, section(), pad=PAD, seed=0)
    after = state_bytes(lm)
    changed = {name for name in before if before[name] != after[name]}
    site = next(iter(lm.sites))
    assert changed == {f"base_model.model.{site}.lora_{x}.default.weight" for x in "AB"}


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(make_lm):
    lm = make_lm(dropout=0.3)

    def bytes_after(seed: int) -> dict[str, bytes]:
        train(lm, seed=seed)
        return state_bytes(lm)

    first = bytes_after(1)
    torch.manual_seed(123)
    assert bytes_after(1) == first
    assert bytes_after(2) != first


def test_the_global_generator_is_left_alone(make_lm):
    lm = make_lm(dropout=0.3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(lm)
    assert torch.equal(torch.rand(3), expected)


def test_which_parameters_require_gradients_is_as_before(lm):
    gate = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    before = {name: p.requires_grad for name, p in lm.model.named_parameters()}
    assert set(before.values()) == {True, False}
    train(lm)
    # The trained ones are frozen again or were theirs to begin with; nothing else may differ.
    assert {name: p.requires_grad for name, p in lm.model.named_parameters()} == before
    hook = next(iter(lm.sites.values())).register_forward_pre_hook(
        lambda module, args: (args[0] + gate.sum(),)
    )
    fit(lm.model, [gate], HISTORY, section(), pad=PAD, seed=0)
    hook.remove()
    assert gate.any()
    assert not gate.requires_grad
    assert {name: p.requires_grad for name, p in lm.model.named_parameters()} == before
    assert not lm.model.training


def test_every_example_is_seen_once_before_any_is_seen_again(lm, monkeypatch):
    seen: list[int] = []

    def spy(encoded, pad):
        seen.extend(EVEN.index(e) for e in encoded)
        return collate(encoded, pad)

    monkeypatch.setattr(training, "collate", spy)
    train(lm, EVEN[:5], steps=5, batch_size=3)
    assert len(seen) == 15
    assert [sorted(seen[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3


def test_a_batch_is_never_larger_than_the_history(lm):
    small = train(lm, HISTORY[:2], batch_size=100, steps=1)
    start(lm)
    whole = mean_loss(lm.model, in_batches(HISTORY[:2], 2, PAD), lm.device)
    assert small == pytest.approx([whole], abs=1e-5)


def test_accumulated_batches_make_the_step_of_one_large_batch(lm, monkeypatch):
    # The same number of response tokens in each example: the mean of means is the mean.
    gradients: list[torch.Tensor] = []
    clip = torch.nn.utils.clip_grad_norm_

    def spy(parameters, norm):
        gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
        return clip(parameters, norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
    one = train(lm, EVEN, steps=1, batch_size=8, accumulate=1)
    two = train(lm, EVEN, steps=1, batch_size=4, accumulate=2)
    assert gradients[0].abs().max() > 1e-4
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)
    assert one == pytest.approx(two, abs=1e-5)


def test_the_proximal_term_pulls_back_to_the_start(lm):
    start(lm)
    origin = flat(lm)
    distances = []
    for mu in (0.0, 1.0, 100.0):
        train(lm, steps=12, lr=0.005, clip=1e9, proximal_mu=mu)
        distances.append((flat(lm) - origin).norm().item())
    assert distances[0] > distances[1] > distances[2] > 0


def test_the_proximal_gradient_is_mu_times_the_way_from_the_start():
    moved, origin = torch.nn.Parameter(torch.tensor([3.0, -1.0])), torch.tensor([1.0, 1.0])
    moved.grad = torch.tensor([0.5, 0.5])
    training._add_proximal_gradient([moved], [origin], 0.1)
    torch.testing.assert_close(moved.grad, torch.tensor([0.7, 0.3]))


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
def test_a_decaying_schedule_ends_at_zero(lm, monkeypatch, name):
    made = []
    real = training.get_scheduler

    def spy(*args, **kwargs):
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(training, "get_scheduler", spy)
    rates = []
    loss = training.response_loss

    def watched(*args):
        rates.append(made[0].get_last_lr()[0])
        return loss(*args)

    monkeypatch.setattr(training, "response_loss", watched)
    train(lm, steps=4, lr=0.02, schedule=name)
    assert rates[0] == 0.02
    if name == "linear":
        assert rates == pytest.approx([0.02, 0.015, 0.01, 0.005])
    if name == "constant":
        assert rates == [0.02] * 4
        return
    assert rates == sorted(rates, reverse=True)
    assert made[0].get_last_lr()[0] == pytest.approx(0, abs=1e-9)


def test_weight_decay_shrinks_what_has_no_gradient(lm):
    # With B = 0 no gradient reaches A in the first step: only decay moves it.
    train(lm, steps=1, lr=0.1, weight_decay=0.5)
    site = next(iter(lm.sites))
    decayed = take_adapter(lm)[site].A
    start(lm)
    torch.testing.assert_close(decayed, take_adapter(lm)[site].A * (1 - 0.1 * 0.5))


def test_a_loss_that_is_not_finite_is_an_error_with_a_remedy_and_changes_nothing(lm):
    parameters = start(lm)
    parameters[0].data[0, 0] = torch.nan
    parameters[1].data.fill_(0.1)
    before = state_bytes(lm)
    with pytest.raises(PerPcsError, match=r"nan with lr = 0\.02; lower the lr"):
        fit(lm.model, parameters, HISTORY, section(), pad=PAD, seed=0)
    assert state_bytes(lm) == before


def test_training_can_be_tried_again_after_a_loss_that_was_not_finite(lm):
    expected = train(lm)
    parameters = start(lm)
    parameters[1].data.fill_(torch.nan)
    with pytest.raises(PerPcsError):
        fit(lm.model, parameters, HISTORY, section(), pad=PAD, seed=0)
    assert train(lm) == expected


def test_which_parameters_require_gradients_is_as_before_after_an_error_too(lm):
    start(lm)
    before = {name: p.requires_grad for name, p in lm.model.named_parameters()}
    gate = torch.nn.Parameter(torch.full((1,), torch.nan), requires_grad=False)
    hook = next(iter(lm.sites.values())).register_forward_pre_hook(
        lambda module, args: (args[0] + gate,)
    )
    with pytest.raises(PerPcsError, match="lower the lr"):
        fit(lm.model, [gate], HISTORY, section(), pad=PAD, seed=0)
    hook.remove()
    assert {name: p.requires_grad for name, p in lm.model.named_parameters()} == before
    assert not lm.model.training


def test_no_examples_are_an_error_that_names_the_setting(lm):
    with pytest.raises(PerPcsError, match=r"lm\.max-length"):
        train(lm, [])


def test_the_response_loss_is_the_mean_loss_of_transformers(lm):
    start(lm)
    for parameter in adapter_parameters(lm):
        parameter.data += 0.05
    batch = collate(HISTORY, PAD)
    whole = lm.model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
    ).loss
    loss, tokens = response_loss(lm.model, batch)
    assert tokens == sum(len(e.response) for e in HISTORY)
    torch.testing.assert_close(loss / tokens, whole)
    assert whole > 1


@pytest.mark.parametrize("size", [1, 3])
def test_the_mean_loss_is_over_tokens_however_they_are_batched(lm, size):
    whole = mean_loss(lm.model, in_batches(HISTORY, 4, PAD), lm.device)
    parts = mean_loss(lm.model, in_batches(HISTORY, size, PAD), lm.device)
    assert parts == pytest.approx(whole, abs=1e-5)


def test_the_mean_loss_of_nothing_is_zero(lm):
    assert mean_loss(lm.model, [], lm.device) == 0
