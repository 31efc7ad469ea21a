"""Closed-form costs against the ledger: every strategy, protocol and wire format."""

import pytest
from test_federation import federation
from test_strategies import changes_for

from fl_perpcs.config import load_config
from fl_perpcs.exchange.costs import stages_of
from fl_perpcs.ledger import read_ledger
from fl_perpcs.runs import open_run
from fl_perpcs.wire import FORMATS
from simulations.traffic import PARTS, Facts, expected, facts_of, measured
from strategies import REGISTRY

PROTOCOLS = {
    "broadcast": {},
    "cached": {"exchange.cache": True},
    "layerwise": {"exchange.protocol": "layerwise"},
    "one-shot": {"exchange.protocol": "one-shot"},
    "server match": {"exchange.protocol": "server-match"},
    "server match by stages": {"exchange.protocol": "server-match", "exchange.match": "by-stages"},
}
OTHERS = {
    "some pieces": {"sharers.ratio": 0.5, "exchange.protocol": "layerwise"},
    "centred": {"assembly.scorer": "centred"},
    "centred one-shot": {"assembly.scorer": "centred", "exchange.protocol": "one-shot"},
    "decoys": {"exchange.protocol": "one-shot", "exchange.decoys": 1, "assembly.top-k": 1},
    "rerank": {"exchange.protocol": "one-shot", "assembly.shortlist": 2, "rerank.items": 3},
    "once": {"exchange.protocol": "server-match", "assembly.per": "history"},
    "random sharers": {"sharers.selection": "random"},
    "no adaptation": {"adaptation.mode": "none"},
    "evaluated adaptation": {"adaptation.fraction-evaluate": 1.0},
    "mlp too": {
        "lora.target-modules": "q_proj,o_proj,up_proj,gate_proj,down_proj",
        "exchange.protocol": "server-match",
        "exchange.match": "by-stages",
    },
}


pytestmark = pytest.mark.usefixtures("without_report")


def check(folder) -> None:
    found = measured(read_ledger(folder))
    told = expected(open_run(folder)[1], facts_of(folder))
    for part in PARTS:
        assert found[part].down == pytest.approx(told[part].down, rel=1e-9), part
        assert found[part].up == pytest.approx(told[part].up, rel=1e-9), part
    assert found["targets"].round_trips == told["targets"].round_trips


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_formula_of_a_protocol_is_its_ledger(small_config, protocol, how):
    changes = {**PROTOCOLS[protocol], "exchange.format": how, "evaluation.references": ""}
    check(federation(small_config(changes)))


def test_the_formula_of_a_cache_knows_what_it_has(small_config):
    values = {"exchange.cache": True, "evaluation.references": "", "sharers.count": 2}
    first = federation(small_config({**values, "seed": 5}, folder="first"))
    borrowed = {
        "sharers.pool": str(first / "pool"),
        "adaptation.mode": "load",
        "adaptation.adapter": str(first / "adaptation"),
    }
    again = federation(small_config({**values, **borrowed, "seed": 5}, folder="again"))
    assert facts_of(again).lacking == {}
    check(again)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_the_formula_of_a_strategy_is_its_ledger(small_config, tmp_path, name):
    changes = {**changes_for(name, tmp_path), "evaluation.references": ""}
    check(federation(small_config(changes)))


@pytest.mark.parametrize("variant", OTHERS)
def test_the_formula_knows_the_settings(small_config, variant):
    check(federation(small_config({**OTHERS[variant], "evaluation.references": ""})))


def test_a_plan_needs_no_run():
    layers = {
        f"model.layers.{n}.self_attn.{name}_proj": (4096, 4096)
        for n in range(32)
        for name in "qkvo"
    }
    assert len(stages_of(layers)) == 64
    facts = Facts(layers, 50, 100, 50, 50, dict.fromkeys(layers, 50), dict.fromkeys(layers, 12), 6)
    told = expected(load_config({"adaptation.mode": "none", "lora.rank": 8}), facts)["targets"]
    # DESIGN's figure: a pool of 50 Llama-2-7B adapters, and its gates.
    adapters, gates = 50 * 128 * 8 * 8192 * 4, 50 * 128 * 4096 * 4
    assert told.down / 50 == pytest.approx(adapters + gates, rel=1e-3)
