"""Splitting, joining and the PEFT folders that other tools read and write."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from fl_perpcs import pieces as pieces_module
from fl_perpcs.assembly import assemble, choose, choose_at, cook, merge
from fl_perpcs.assembly.stages import Front, ask
from fl_perpcs.config import AssemblySection, FitSection, LoraSection, load_config
from fl_perpcs.errors import PerPcsError
from fl_perpcs.gates import gated, train_gates
from fl_perpcs.lm import (
    LM,
    adapter_parameters,
    attach,
    initial_adapter,
    load_adaptation,
    merge_into_base,
    put_adapter,
    shapes_of,
    site_shapes,
    take_adapter,
)
from fl_perpcs.pieces import Adapter, Factors, join, load_peft, save_peft, split, stack
from fl_perpcs.pool import Pool, PoolSpec, Stack
from fl_perpcs.text import Encoded, collate
from fl_perpcs.training import fit, response_loss

SITE = "model.layers.0.self_attn.q_proj"
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@st.composite
def adapters(draw) -> Adapter:
    adapter = {}
    for number in range(draw(st.integers(1, 4))):
        rank, d_in, d_out = (draw(st.integers(1, 5)) for _ in range(3))
        values = st.floats(width=32, allow_nan=True, allow_infinity=True)
        A = draw(st.lists(values, min_size=rank * d_in, max_size=rank * d_in))
        B = draw(st.lists(values, min_size=rank * d_out, max_size=rank * d_out))
        adapter[f"layers.{number}.q_proj"] = Factors(
            torch.tensor(A).reshape(rank, d_in), torch.tensor(B).reshape(d_out, rank)
        )
    return adapter


def bits(adapter: Adapter) -> dict[str, tuple]:
    return {
        site: tuple((tuple(t.shape), t.dtype, t.contiguous().numpy().tobytes()) for t in factors)
        for site, factors in adapter.items()
    }


def random_adapter(lm: LM, rank: int = 2, seed: int = 0) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    return {
        site: Factors(
            torch.randn(rank, d_in, generator=generator) / 4,
            torch.randn(d_out, rank, generator=generator) / 4,
        )
        for site, (d_in, d_out) in shapes_of(lm).items()
    }


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def logits_of_folder(base_folder: Path, adapter_folder: Path) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    return logits(PeftModel.from_pretrained(base, str(adapter_folder)).eval())


@settings(deadline=None, max_examples=40)
@given(adapters())
def test_join_after_split_returns_every_bit(adapter):
    gates = {site: torch.zeros(f.A.shape[1]) for site, f in adapter.items()}
    pieces = split(adapter, gates)
    assert bits(join(pieces)) == bits(adapter)
    assert list(join(pieces)) == list(adapter)
    assert [piece.gate is gates[piece.site] for piece in pieces] == [True] * len(adapter)


def test_split_refuses_gates_of_other_sites():
    adapter = {SITE: Factors(torch.ones(1, 2), torch.ones(2, 1))}
    with pytest.raises(PerPcsError, match=r"other\.site"):
        split(adapter, {SITE: torch.zeros(2), "other.site": torch.zeros(2)})


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(0))
def test_the_update_of_stacked_adapters_is_the_sum_of_updates(r1, r2, d_in, d_out, seed):
    generator = torch.Generator().manual_seed(seed % 2**32)

    def factors(rank):
        return Factors(
            torch.randn(rank, d_in, generator=generator, dtype=torch.float64),
            torch.randn(d_out, rank, generator=generator, dtype=torch.float64),
        )

    first = {"both": factors(r1), "first": factors(r1)}
    second = {"both": factors(r2), "second": factors(r2)}
    stacked = stack(first, second)
    assert stacked.keys() == {"both", "first", "second"}
    torch.testing.assert_close(
        stacked["both"].B @ stacked["both"].A,
        first["both"].B @ first["both"].A + second["both"].B @ second["both"].A,
    )
    assert stacked["first"] is first["first"]
    assert stacked["second"] is second["second"]


@settings(deadline=None, max_examples=25)
@given(adapters(), st.floats(0.125, 8))
def test_a_peft_folder_returns_every_bit(tmp_path_factory, adapter, scale):
    rank = max(f.A.shape[0] for f in adapter.values())
    adapter = {s: f for s, f in adapter.items() if f.A.shape[0] == rank}
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    save_peft(adapter, folder, scale=scale, base="somewhere")
    loaded, loaded_scale = load_peft(folder)
    assert bits(loaded) == bits(adapter)
    assert loaded_scale == pytest.approx(scale, rel=1e-12)


def test_sites_of_a_lower_rank_are_filled_up_with_zeros(tmp_path):
    low = Factors(torch.ones(1, 3), torch.ones(2, 1))
    high = Factors(torch.ones(3, 3), torch.ones(2, 3))
    folder = save_peft({"a.q_proj": low, "a.v_proj": high}, tmp_path / "x", scale=1.0, base="b")
    loaded, _ = load_peft(folder)
    assert loaded["a.q_proj"].A.shape == (3, 3)
    assert torch.equal(loaded["a.q_proj"].B @ loaded["a.q_proj"].A, low.B @ low.A)
    assert bits({"a": loaded["a.v_proj"]}) == bits({"a": high})


def exported_adapters(lm: LM) -> dict[str, Adapter]:
    whole = random_adapter(lm)
    last = list(whole)[-1]
    return {
        "factor": whole,
        "delta of rank 3r": random_adapter(lm, rank=6),
        "sites missing": {SITE: whole[SITE], last: whole[last]},
        "ranks mixed": {**whole, SITE: random_adapter(lm, rank=5)[SITE]},
    }


@pytest.mark.parametrize("kind", ["factor", "delta of rank 3r", "sites missing", "ranks mixed"])
def test_peft_loads_an_exported_folder_with_the_same_logits(lm, tiny_folder, tmp_path, kind):
    adapter = exported_adapters(lm)[kind]
    save_peft(adapter, tmp_path / "adapter", scale=2.0, base=str(tiny_folder))
    unadapted = logits(lm.model)
    put_adapter(lm, adapter)
    here = logits(lm.model)
    assert (here - unadapted).abs().max() > 1e-2
    there = logits_of_folder(tiny_folder, tmp_path / "adapter")
    torch.testing.assert_close(there, here, atol=1e-5, rtol=0)


def test_an_adaptation_stacked_with_an_adapter_needs_no_adapted_base(lm, tiny_folder, tmp_path):
    adaptation, adapter = random_adapter(lm, seed=1), random_adapter(lm, rank=4, seed=2)
    folder = save_peft(
        stack(adaptation, adapter), tmp_path / "both", scale=2.0, base=str(tiny_folder)
    )
    merge_into_base(lm, adaptation)
    put_adapter(lm, adapter)
    there = logits_of_folder(tiny_folder, folder)
    torch.testing.assert_close(there, logits(lm.model), atol=1e-5, rtol=0)


def peft_folder(base_folder: Path, folder: Path, **options) -> PeftModel:
    """An adapter with random factors, written by peft itself."""
    options = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], **options}
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base_folder),
        LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options),
    )
    model.save_pretrained(str(folder))
    return model.eval()


def test_a_folder_written_by_peft_imports_as_pieces(tiny_folder, tmp_path, make_lm):
    written = peft_folder(tiny_folder, tmp_path / "own")
    adapter, scale = load_peft(tmp_path / "own")
    assert scale == 4.0
    assert {site.rsplit(".", 1)[-1] for site in adapter} == {"q_proj", "v_proj"}
    lm = make_lm(rank=2, alpha=8.0)
    gates = {site: torch.zeros(f.A.shape[1]) for site, f in adapter.items()}
    put_adapter(lm, join(split(adapter, gates)))
    torch.testing.assert_close(logits(lm.model), logits(written), atol=1e-5, rtol=0)


def test_an_imported_adaptation_is_brought_to_the_configs_scale(
    tiny_folder, tmp_path, make_lm, small_config
):
    written = peft_folder(tiny_folder, tmp_path / "own")
    config = load_config(
        small_config({"adaptation.mode": "load", "adaptation.adapter": str(tmp_path / "own")})
    )
    lm = make_lm()  # α/r = 2, the folder's is 4
    merge_into_base(lm, load_adaptation(config, site_shapes(config)))
    torch.testing.assert_close(logits(lm.model), logits(written), atol=1e-5, rtol=0)


def test_an_adaptation_of_another_shape_is_refused(tmp_path, small_config):
    factors = Factors(torch.ones(2, 7), torch.ones(7, 2))
    folder = save_peft({SITE: factors}, tmp_path / "odd", scale=1.0, base="b")
    config = load_config(
        small_config({"adaptation.mode": "load", "adaptation.adapter": str(folder)})
    )
    with pytest.raises(PerPcsError, match="does not fit"):
        load_adaptation(config, site_shapes(config))


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"rank_pattern": {"v_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"v_proj": 2}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(tiny_folder, tmp_path, option, named):
    peft_folder(tiny_folder, tmp_path / "odd", **option)
    with pytest.raises(PerPcsError, match=named):
        load_peft(tmp_path / "odd")


def test_another_kind_of_adapter_is_refused(lm, tmp_path):
    folder = save_peft(random_adapter(lm), tmp_path / "x", scale=1.0, base="b")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "LOHA"}))
    with pytest.raises(PerPcsError, match="LOHA"):
        load_peft(folder)


def test_a_missing_tensor_is_named(lm, tmp_path):
    folder = save_peft(random_adapter(lm), tmp_path / "x", scale=1.0, base="b")
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors[f"base_model.model.{SITE}.lora_B.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(PerPcsError, match=rf"{SITE}\.lora_B"):
        load_peft(folder)


def test_a_tensor_that_is_no_factor_is_refused(lm, tmp_path):
    folder = save_peft(random_adapter(lm), tmp_path / "x", scale=1.0, base="b")
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.ones(1)}, folder / "adapter_model.safetensors")
    with pytest.raises(PerPcsError, match="nothing else"):
        load_peft(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "garbage"])
def test_a_folder_with_a_missing_or_damaged_file_is_refused(lm, tmp_path, name, damage):
    folder = save_peft(random_adapter(lm), tmp_path / "x", scale=1.0, base="b")
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(b"not what it was")
    with pytest.raises(PerPcsError, match="is not a PEFT folder"):
        load_peft(folder)


def test_an_existing_folder_is_not_overwritten(lm, tmp_path):
    folder = save_peft(random_adapter(lm), tmp_path / "x", scale=1.0, base="b")
    before = (folder / "adapter_model.safetensors").read_bytes()
    with pytest.raises(PerPcsError, match="exists"):
        save_peft(random_adapter(lm, seed=9), folder, scale=1.0, base="b")
    assert (folder / "adapter_model.safetensors").read_bytes() == before


def test_a_folder_is_invisible_when_saving_fails_midway(lm, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(pieces_module, "save_file", full)
    with pytest.raises(OSError, match="disk full"):
        save_peft(random_adapter(lm), tmp_path / "x", scale=1.0, base="b")
    assert not (tmp_path / "x").exists()
    monkeypatch.undo()
    save_peft(random_adapter(lm), tmp_path / "x", scale=1.0, base="b")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


COMMON = {
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA_LIKE = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FAMILIES = {
    "gpt2": (
        GPT2Config(
            n_embd=32, n_layer=2, n_head=2, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, **COMMON
        ),
        "c_attn",
    ),
    "qwen2": (Qwen2Config(**LLAMA_LIKE), "q_proj,v_proj"),
    "mistral": (MistralConfig(**LLAMA_LIKE, sliding_window=4), "q_proj,o_proj"),
    "qwen3": (Qwen3Config(**LLAMA_LIKE, head_dim=16), "q_proj,k_proj,up_proj"),
    "phi": (PhiConfig(**LLAMA_LIKE | {"num_key_value_heads": 2}), "q_proj,dense,fc1"),
    "phi3": (Phi3Config(**LLAMA_LIKE), "qkv_proj,o_proj"),
    "gemma": (GemmaConfig(**LLAMA_LIKE, head_dim=16), "q_proj,down_proj"),
}
HISTORY = [
    Encoded((5, 6, 7, 8, 9), (10, 11, 1)),
    Encoded((12, 13), (14, 1)),
    Encoded((5, 9, 9, 9), (11, 3, 4, 1)),
]


@pytest.fixture(params=FAMILIES)
def family(request) -> LM:
    config, modules = FAMILIES[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(config).eval()
    lora = LoraSection(rank=2, alpha=4.0, dropout=0.0, target_modules=modules)
    return attach(base, SimpleNamespace(pad_token_id=0), lora)


def test_other_families_compute_the_response_loss_from_few_logits(family):
    batch = collate(HISTORY, pad=0)
    put_adapter(family, random_adapter(family))
    whole = family.model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
    )
    loss, tokens = response_loss(family.model, batch)
    assert tokens == 9
    torch.testing.assert_close(loss / tokens, whole.loss, atol=1e-5, rtol=0)


def test_other_families_share_and_assemble(family, tmp_path):
    how = FitSection(lr=0.02, steps=6, batch_size=3)
    pool = Pool(PoolSpec(2, 4.0, shapes_of(family)))
    for seed, sharer in enumerate(("a", "b")):
        put_adapter(family, initial_adapter(shapes_of(family), 2, seed=0))
        losses = fit(
            family.model, adapter_parameters(family), HISTORY[seed:], how, pad=0, seed=seed
        )
        assert losses[-1] < losses[0]
        adapter = take_adapter(family)
        gates, _ = train_gates(family, HISTORY, how, seed=seed)
        assert all(gate.abs().sum() > 0 for gate in gates.values())
        assert bits(take_adapter(family)) == bits(adapter)
        pool.admit(sharer, split(adapter, gates), family.fingerprint)

    batch = collate(HISTORY, pad=0)
    stacks = pool.stacks()
    recipe = assemble(family, stacks, [batch], AssemblySection(top_k=2), seed=0)
    assert list(recipe) == list(family.sites)
    adapter = cook(recipe, stacks, "delta")
    put_adapter(family, adapter)
    in_slot = logits(family.model)
    with gated(family, {site: torch.zeros(i) for site, (i, _) in shapes_of(family).items()}):
        assert not torch.allclose(logits(family.model), in_slot, atol=1e-6)

    # Other layouts of the weights too (gpt2 keeps them transposed) merge and export alike.
    folder = save_peft(adapter, tmp_path / "x", scale=2.0, base="b")
    merge_into_base(family, adapter)
    torch.testing.assert_close(logits(family.model), in_slot, atol=1e-5, rtol=0)
    loaded, scale = load_peft(folder)
    assert scale == 2.0
    assert bits(loaded) == bits(adapter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_families_assemble_by_stages_bit_for_bit(family, dtype):
    family.model.to(dtype)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    stacks = {
        site: Stack(("a", "b", "c"), randn(3, 2, d_in), 0.3 * randn(3, d_out, 2), randn(3, d_in))
        for site, (d_in, d_out) in shapes_of(family).items()
    }
    how = AssemblySection(top_k=2)
    batches = [collate(HISTORY[:2], pad=0), collate(HISTORY[2:], pad=0)]
    front, stages = Front(), 0
    chosen: list[dict] = [{}, {}]
    while len(front.asked) < len(stacks):
        queries, front = ask(family, batches, stacks, front)
        stages += 1
        for site, rows in queries.items():
            for number, row in enumerate(rows):
                choice = choose_at(site, stacks[site], row, how, number)
                chosen[number][site] = choice
                front.factors[number][site] = merge(stacks[site], choice, how.merge)
    assert 1 < stages <= len(stacks)
    for number, batch in enumerate(batches):
        for site, choice in choose(family, stacks, batch, how, number).items():
            assert torch.equal(choice.indices, chosen[number][site].indices), site
            assert torch.equal(choice.weights, chosen[number][site].weights), site


def test_gpt2_loads_an_exported_folder(tmp_path):
    config, modules = FAMILIES["gpt2"]
    base = AutoModelForCausalLM.from_config(config).eval()
    base.save_pretrained(tmp_path / "base")
    lora = LoraSection(rank=2, alpha=4.0, target_modules=modules)
    lm = attach(base, SimpleNamespace(pad_token_id=0), lora)
    adapter = random_adapter(lm)
    put_adapter(lm, adapter)
    lm.model.eval()
    folder = save_peft(adapter, tmp_path / "x", scale=2.0, base=str(tmp_path / "base"))
    there = logits_of_folder(tmp_path / "base", folder)
    torch.testing.assert_close(there, logits(lm.model), atol=1e-5, rtol=0)
