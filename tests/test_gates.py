"""Gates: trained on a frozen adapter, and out of the way afterwards."""

import pytest
import torch

from fl_perpcs.config import FitSection
from fl_perpcs.errors import PerPcsError
from fl_perpcs.gates import gated, train_gates
from fl_perpcs.lm import put_adapter, shapes_of, take_adapter
from fl_perpcs.pieces import Factors
from fl_perpcs.text import Encoded, in_batches
from fl_perpcs.training import mean_loss

HISTORY = [
    Encoded((50, 60, 70, 80, 90), (100, 110, 1)),
    Encoded((120, 130), (140, 1)),
    Encoded((50, 90, 90, 95), (110, 300, 400, 1)),
]
HOW = FitSection(lr=0.05, steps=20, batch_size=3)
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def adapted(lm):
    generator = torch.Generator().manual_seed(0)
    put_adapter(
        lm,
        {
            site: Factors(
                torch.randn(2, d_in, generator=generator) / 4,
                torch.randn(d_out, 2, generator=generator) / 4,
            )
            for site, (d_in, d_out) in shapes_of(lm).items()
        },
    )
    lm.model.eval()
    return lm


def logits(lm) -> torch.Tensor:
    with torch.no_grad():
        return lm.model(input_ids=IDS).logits


def hooks(lm) -> int:
    return sum(len(layer.lora_dropout["default"]._forward_pre_hooks) for layer in lm.sites.values())


def state_bytes(lm) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in lm.model.state_dict().items()}


def zero_gates(lm) -> dict[str, torch.Tensor]:
    return {site: torch.zeros(d_in) for site, (d_in, _) in shapes_of(lm).items()}


def test_a_zero_gate_halves_the_update(adapted):
    with gated(adapted, zero_gates(adapted)):
        halved_by_gates = logits(adapted)
    adapter = take_adapter(adapted)
    put_adapter(adapted, {site: Factors(f.A, f.B / 2) for site, f in adapter.items()})
    torch.testing.assert_close(halved_by_gates, logits(adapted))


def test_a_gate_weighs_each_input_by_the_sigmoid_of_its_product(adapted):
    site, layer = next(iter(adapted.sites.items()))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, layer.in_features, generator=generator)
    gate = torch.randn(layer.in_features, generator=generator)
    with torch.no_grad():
        with gated(adapted, {site: gate}):
            output = layer(x)
        A, B = take_adapter(adapted)[site]
        weight = torch.sigmoid(x @ gate).unsqueeze(-1)
        expected = layer.get_base_layer()(x) + 2.0 * (weight * x) @ A.T @ B.T
    torch.testing.assert_close(output, expected)


def test_the_gates_of_a_site_change_that_path_only(adapted):
    sites = list(adapted.sites)
    chosen = sites[3]
    inputs, outputs = {}, {}

    def keep(site):
        def hook(module, args, output):
            inputs.setdefault(site, []).append(args[0])
            outputs.setdefault(site, []).append(output)

        return hook

    for site, layer in adapted.sites.items():
        layer.register_forward_hook(keep(site))
    logits(adapted)
    with gated(adapted, {chosen: torch.ones(shapes_of(adapted)[chosen][0])}):
        logits(adapted)
    for site in sites[:3]:
        assert torch.equal(*outputs[site])
    assert torch.equal(*inputs[chosen])
    assert not torch.equal(*outputs[chosen])
    # The frozen layer itself is not gated: without an update a gate changes nothing.
    put_adapter(adapted, {})
    base = logits(adapted)
    with gated(adapted, zero_gates(adapted)):
        assert torch.equal(logits(adapted), base)


def test_training_gates_lowers_the_loss_and_leaves_adapter_and_base_unchanged(adapted):
    before = state_bytes(adapted)
    flags = {name: p.requires_grad for name, p in adapted.model.named_parameters()}
    gates, losses = train_gates(adapted, HISTORY, HOW, seed=0)
    assert losses[-1] < losses[0]
    assert list(gates) == list(adapted.sites)
    assert {site: (len(gate),) for site, gate in gates.items()} == {
        site: (d_in,) for site, (d_in, _) in shapes_of(adapted).items()
    }
    assert all(gate.any() and not gate.requires_grad for gate in gates.values())
    assert state_bytes(adapted) == before
    assert {n: p.requires_grad for n, p in adapted.model.named_parameters()} == flags


def test_training_starts_from_zero_gates(adapted):
    _, losses = train_gates(adapted, HISTORY, HOW, seed=0)
    adapter = take_adapter(adapted)
    put_adapter(adapted, {site: Factors(f.A, f.B / 2) for site, f in adapter.items()})
    halved = mean_loss(adapted.model, in_batches(HISTORY, 3, 0), adapted.device)
    assert losses[0] == pytest.approx(halved, abs=1e-5)


def test_the_same_seed_gives_the_same_gates(adapted):
    first, _ = train_gates(adapted, HISTORY, HOW, seed=3)
    second, _ = train_gates(adapted, HISTORY, HOW, seed=3)
    assert all(torch.equal(first[site], second[site]) for site in first)


def test_no_hook_is_left_behind(adapted):
    with gated(adapted, zero_gates(adapted)):
        assert hooks(adapted) == len(adapted.sites)
    assert hooks(adapted) == 0
    train_gates(adapted, HISTORY, HOW, seed=0)
    assert hooks(adapted) == 0


def test_no_hook_is_left_behind_after_an_exception(adapted):
    with pytest.raises(RuntimeError, match="in the middle"), gated(adapted, zero_gates(adapted)):
        raise RuntimeError("in the middle")
    assert hooks(adapted) == 0
    with pytest.raises(PerPcsError):
        train_gates(adapted, [], HOW, seed=0)
    assert hooks(adapted) == 0
