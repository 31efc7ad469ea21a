"""The published implementation's outputs, reproduced through the public functions."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from fl_perpcs.assembly import assemble, choose, cook
from fl_perpcs.config import AssemblySection, LoraSection
from fl_perpcs.gates import gated
from fl_perpcs.lm import LM, attach, put_adapter, shapes_of
from fl_perpcs.pieces import Piece, join
from fl_perpcs.pool import Pool, PoolSpec
from fl_perpcs.text import IGNORE, Batch
from fl_perpcs.training import mean_loss, response_loss

FILE = Path(__file__).parent / "golden" / "assembly_reference.safetensors"
CLOSE = {"atol": 1e-5, "rtol": 0.0}
CASES = {
    "topk3": AssemblySection(top_k=3, temperature=1.0),
    "topk1": AssemblySection(top_k=1, temperature=1.0),
    "topk8_t05": AssemblySection(top_k=8, temperature=0.5),
}


@pytest.fixture(scope="module")
def golden():
    with safe_open(FILE, "pt") as file:
        return file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


@pytest.fixture
def lm(golden) -> LM:
    meta, tensors = golden
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    base = LlamaForCausalLM(
        LlamaConfig(
            **{key: int(meta[key]) for key in (*sizes, "intermediate_size")},
            rms_norm_eps=float(meta["rms_norm_eps"]),
            rope_parameters={"rope_type": "default", "rope_theta": float(meta["rope_theta"])},
            tie_word_embeddings=False,
        )
    )
    weights = {k.removeprefix("base."): v for k, v in tensors.items() if k.startswith("base.")}
    missing, unexpected = base.load_state_dict(weights, strict=False)
    assert not missing and not unexpected
    lora = LoraSection(rank=int(meta["lora_r"]), alpha=float(meta["lora_alpha"]), dropout=0.0)
    return attach(base.eval(), None, lora)


def pieces(tensors, sharer: int, sites) -> list[Piece]:
    return [
        Piece(site, *(tensors[f"sharer{sharer}.{site}.{n}"] for n in ("lora_A", "lora_B", "gate")))
        for site in sites
    ]


@pytest.fixture
def pool(golden, lm) -> Pool:
    meta, tensors = golden
    pool = Pool(PoolSpec(int(meta["lora_r"]), float(meta["lora_alpha"]), shapes_of(lm)))
    for i in range(int(meta["num_sharers"])):
        pool.admit(f"sharer{i}", pieces(tensors, i, lm.sites), "golden")
    return pool


def history(tensors, order=None) -> list[Batch]:
    ids, labels = tensors["history.input_ids"], tensors["history.labels"]
    order = torch.arange(len(ids)) if order is None else order
    batches = []
    for rows in order.split(4):
        lab = labels[rows].clone()
        lab[lab == 0] = IGNORE
        batches.append(Batch(ids[rows], (ids[rows] != 0).long(), lab))
    return batches


@pytest.mark.parametrize("case", CASES)
def test_assembled_adapter(golden, lm, pool, case):
    _, tensors = golden
    batches = history(tensors, tensors[f"expected.{case}.batch_order"])
    stacks = pool.stacks()
    adapter = cook(assemble(lm, stacks, batches, CASES[case], seed=0), stacks, "factor")
    assert len(adapter) == len(lm.sites)
    for site, (A, B) in adapter.items():
        torch.testing.assert_close(A, tensors[f"expected.{case}.{site}.lora_A"], **CLOSE)
        torch.testing.assert_close(B, tensors[f"expected.{case}.{site}.lora_B"], **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_selection_of_the_last_batch(golden, lm, pool, case):
    _, tensors = golden
    last = history(tensors, tensors[f"expected.{case}.batch_order"])[-1]
    for site, choice in choose(lm, pool.stacks(), last, CASES[case]).items():
        prefix = f"expected.{case}.last_batch.{site}"
        assert choice.indices.tolist() == tensors[f"{prefix}.indices"].tolist()
        torch.testing.assert_close(choice.weights, tensors[f"{prefix}.weights"].float(), **CLOSE)


def test_losses(golden, lm, pool):
    _, tensors = golden
    batches = history(tensors)

    def loss() -> torch.Tensor:
        return torch.tensor([mean_loss(lm.model, batches, lm.device)])

    torch.testing.assert_close(loss(), tensors["expected.base.loss"], **CLOSE)
    stacks = pool.stacks()
    order = history(tensors, tensors["expected.topk3.batch_order"])
    put_adapter(lm, cook(assemble(lm, stacks, order, CASES["topk3"], seed=0), stacks, "factor"))
    torch.testing.assert_close(loss(), tensors["expected.topk3.loss"], **CLOSE)


def test_gate_gradients(golden, lm):
    _, tensors = golden
    sharer = pieces(tensors, 0, lm.sites)
    put_adapter(lm, join(sharer))
    gates = {piece.site: torch.nn.Parameter(piece.gate.clone()) for piece in sharer}
    ids, labels = tensors["history.input_ids"], tensors["history.labels"].clone()
    labels[labels == 0] = IGNORE
    with gated(lm, dict(gates)):
        loss, tokens = response_loss(lm.model, Batch(ids, (ids != 0).long(), labels))
    loss = loss / tokens
    loss.backward()
    torch.testing.assert_close(
        loss.detach().reshape(1), tensors["expected.gated_sharer0.loss"], **CLOSE
    )
    for site, gate in gates.items():
        torch.testing.assert_close(
            gate.grad, tensors[f"expected.gated_sharer0.grad.{site}.gate"], **CLOSE
        )


def test_a_pool_of_one_sharer_returns_its_adapter(golden, lm):
    _, tensors = golden
    sharer = pieces(tensors, 3, lm.sites)
    pool = Pool(PoolSpec(int(golden[0]["lora_r"]), float(golden[0]["lora_alpha"]), shapes_of(lm)))
    pool.admit("only", sharer, "golden")
    for how in ("factor", "delta"):
        stacks = pool.stacks()
        section = AssemblySection(top_k=3, merge=how)
        adapter = cook(assemble(lm, stacks, history(tensors), section, seed=0), stacks, how)
        for piece in sharer:
            assert torch.equal(adapter[piece.site].A, piece.A)
            assert torch.equal(adapter[piece.site].B, piece.B)
