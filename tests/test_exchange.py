"""The protocols: what targets end up with, what each costs, and what the server gets to see."""

import json
from pathlib import Path

import pytest
import torch
from fake_grid import FakeGrid
from test_federation import federation

from fl_perpcs import client_app, server_app
from fl_perpcs.config import ConfigError, load_config
from fl_perpcs.disk import Drawer
from fl_perpcs.errors import PerPcsError
from fl_perpcs.ledger import read_ledger
from fl_perpcs.messages import tensors_of, unpack_request
from fl_perpcs.paths import home
from fl_perpcs.runs import create_run, read_lines

# What a target ends up with, whichever way it got there.
OUTCOME = ("recipes.json", "predictions", "metrics.jsonl", "results.json")
QUICK = {"evaluation.references": "", "evaluation.resamples": 0}
STAGES = {"exchange.protocol": "server-match", "exchange.match": "by-stages"}
LAYERWISE = {"exchange.protocol": "layerwise"}
ONE_SHOT = {"exchange.protocol": "one-shot"}
VARIANTS = {
    "published": {},
    "delta": {"assembly.merge": "delta"},
    "sampled": {"assembly.selection": "sample", "assembly.sample-top-k": 3},
    "nucleus": {"assembly.selection": "top-p", "assembly.top-p": 0.6},
    "some pieces": {"sharers.ratio": 0.4},
    "every linear layer": {"lora.target-modules": "q_proj,o_proj,gate_proj,up_proj,down_proj"},
    "centred": {"assembly.scorer": "centred", "assembly.popularity": 0.5},
}
AT_HOME = {
    "two passes": {"assembly.passes": 2},
    "shortlist": {"assembly.shortlist": 2},
    "mixing": {"mixing.per": "site", "mixing.steps": 2},
    "tuning": {"tuning.factors": "AB", "tuning.steps": 2, "tuning.batch-size": 2},
}


pytestmark = pytest.mark.usefixtures("without_report")


@pytest.fixture
def run(small_config):
    """Run a federation with some changes, in a folder of its own."""
    count = iter(range(100))

    def make(changes: dict, nodes: int = 2) -> Path:
        return federation(small_config({**QUICK, **changes}, folder=f"run-{next(count)}"), nodes)

    return make


@pytest.fixture
def spied(small_config):
    """Run a federation and keep the messages and the replies."""

    class Spy(FakeGrid):
        def answer(self, message):
            reply = super().answer(message)
            replies.append((message.metadata.message_type, reply))
            return reply

    replies: list = []

    def make(changes: dict, folder: str = "spied"):
        values = small_config({**QUICK, **changes}, folder=folder)
        config = load_config(values)
        grid = Spy(client_app.app, values, 2)
        server_app.run_federation(grid, config, create_run(config))
        return Path(config.run.dir), grid.sent, replies

    return make


def outcome(folder: Path) -> dict[str, object]:
    """Return what must be the same: answers, losses and recipes."""
    results = json.loads((folder / "results.json").read_text())
    for row in results["methods"]:
        del row["costs"]
    return {
        "results": results["methods"],
        "recipes": json.loads((folder / "recipes.json").read_text()),
        "predictions": (folder / "predictions/assembled.jsonl").read_bytes(),
    }


def _task_adapter(folder: Path) -> int:
    """Return the bytes of the task adapter, which goes along with each user's first message."""
    return next(e.arrays for e in read_ledger(folder) if e.phase.startswith("adapt") and e.arrays)


@pytest.mark.parametrize("way", [LAYERWISE, STAGES], ids=["layerwise", "server match"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_by_layers_the_result_is_that_of_a_broadcast_bit_for_bit(run, variant, way):
    expected = outcome(run(VARIANTS[variant]))
    found = outcome(run({**VARIANTS[variant], **way}))
    if way is STAGES:  # the server keeps weights in 64 bits
        assert found.pop("recipes").keys() == expected.pop("recipes").keys()
    assert found == expected


@pytest.mark.parametrize("variant", AT_HOME)
def test_what_a_target_does_at_home_is_the_same_by_layers(run, variant):
    assert outcome(run({**AT_HOME[variant], **LAYERWISE})) == outcome(run(AT_HOME[variant]))


def test_the_passes_by_layers_are_those_of_a_broadcast(run):
    changes = {"assembly.passes": 2}
    costs = [
        json.loads((folder / "results.json").read_text())["methods"][0]["costs"]
        for folder in (run(changes), run({**changes, **LAYERWISE}))
    ]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("variant", [*VARIANTS, "tuning"])
def test_one_shot_is_matching_at_once_by_the_target_or_by_the_server(run, variant):
    changes = {**VARIANTS, **AT_HOME}[variant]
    at_home = outcome(run({**changes, **ONE_SHOT}))
    at_server = outcome(run({**changes, "exchange.protocol": "server-match"}))
    assert at_home.pop("recipes").keys() == at_server.pop("recipes").keys()
    assert at_home == at_server


def test_one_shot_is_an_approximation(run):
    assert outcome(run(ONE_SHOT))["recipes"] != outcome(run({}))["recipes"]


@pytest.mark.parametrize("per", ["batch", "history"])
@pytest.mark.parametrize(
    "changes",
    [
        {"assembly.shortlist": 2, "rerank.items": 3},
        {"rerank.items": 3, "mixing.per": "site", "mixing.steps": 2},
    ],
    ids=["shortlist", "mixing"],
)
def test_a_rerank_needs_the_shortlist_alone(run, changes, per):
    changes = {**changes, "assembly.per": per}
    assert outcome(run({**changes, **ONE_SHOT})) == outcome(run(changes))


def test_once_over_the_history_one_shot_is_exact(run):
    changes = {"assembly.per": "history"}
    assert outcome(run({**changes, **ONE_SHOT})) == outcome(run(changes))


@pytest.mark.parametrize("way", [LAYERWISE, ONE_SHOT], ids=["layerwise", "one-shot"])
def test_decoys_hide_the_choice_and_change_nothing_else(spied, way):
    plain, _, replies = spied({**way, "assembly.top-k": 1}, folder="plain")
    folder, _sent, more = spied({**way, "assembly.top-k": 1, "exchange.decoys": 1}, folder="more")
    assert outcome(folder) == outcome(plain)
    recipes = json.loads((folder / "recipes.json").read_text())
    sites = tuple(next(iter(recipes.values())))
    del replies
    asked = [r for kind, r in more if kind in ("query.choose", "query.advance")]
    with_decoys = asked[len(asked) // 2 :]
    counts = [len(found) for r in with_decoys for found in unpack_request(r, sites).values()]
    assert min(counts) >= 2


def test_decoys_take_no_part_in_a_rerank(run):
    changes = {"assembly.shortlist": 1, "rerank.items": 3}
    hidden = run({**changes, **ONE_SHOT, "exchange.decoys": 2})
    assert outcome(hidden) == outcome(run(changes))


@pytest.mark.parametrize("way", [LAYERWISE, ONE_SHOT], ids=["layerwise", "one-shot"])
def test_a_piece_that_was_not_sent_is_named(run, monkeypatch, way):
    from fl_perpcs.exchange.offer import Offer

    pack = Offer.pack_asked

    def less(self, request, how, **kwargs):
        site = next(iter(request))
        return pack(self, {**request, site: request[site][1:]}, how, **kwargs)

    monkeypatch.setattr(Offer, "pack_asked", less)
    with pytest.raises(PerPcsError, match=r"sharer number 0+\d at '.*' was asked for and not sent"):
        run(way)


def test_nothing_of_an_exchange_stays_on_the_node(run):
    run({**LAYERWISE})
    run({**STAGES})
    run({**ONE_SHOT})
    assert not [*home().joinpath("clients").rglob("front*"), *home().rglob("gates.safetensors")]


@pytest.mark.parametrize("how", ["bfloat16", "float16", "int8"])
def test_smaller_formats_cost_less_and_change_little(run, how):
    folders = run({}), run({"exchange.format": how})
    sent = [
        sum(e.arrays for e in read_ledger(f) if e.message == "evaluate.assembled") for f in folders
    ]
    adaptation = 3 * _task_adapter(folders[0])
    assert sent[1] - adaptation < 0.65 * (sent[0] - adaptation)
    losses = [json.loads((f / "results.json").read_text())["methods"][0]["loss"] for f in folders]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_by_reference_the_result_and_the_ledger_are_the_same(run):
    sent, referred = run({}), run({"exchange.by-reference": True})
    assert outcome(referred) == outcome(sent)
    ledgers = [
        [(e.phase, e.user, e.direction, e.arrays, e.metadata) for e in read_ledger(f)]
        for f in (sent, referred)
    ]
    assert ledgers[0] == ledgers[1]
    wires = [sum(e.wire for e in read_ledger(f) if e.direction == "down") for f in (sent, referred)]
    # Node ids are of random lengths, a byte or two in each message.
    assert wires[0] == pytest.approx(wires[1], abs=200)


def test_by_reference_the_pool_is_in_no_message(spied):
    _, sent, _ = spied({"exchange.by-reference": True})
    assembled = [m for m in sent if m.metadata.message_type == "evaluate.assembled"]
    assert assembled
    assert not any("pool" in m.content.array_records for m in assembled)


def test_a_second_assembly_costs_what_has_changed(run, small_config):
    cache = {"exchange.cache": True}
    first = run(cache)
    borrowed = {
        "sharers.pool": str(first / "pool"),
        "adaptation.mode": "load",
        "adaptation.adapter": str(first / "adaptation"),
    }
    again = run({**cache, **borrowed})
    assert outcome(again) == outcome(first)
    assert outcome(run(borrowed)) == outcome(first)

    def pool_bytes(folder: Path) -> int:
        return sum(e.arrays for e in read_ledger(folder) if e.message == "evaluate.assembled")

    assert pool_bytes(again) == 0 < pool_bytes(first)


def test_the_server_sees_queries_only_where_it_matches(spied):
    _, _sent, replies = spied(ONE_SHOT)
    kinds = {kind for kind, _ in replies}
    assert "query.all_queries" not in kinds
    _, _, replies = spied({"exchange.protocol": "server-match"}, folder="match")
    queries = [r for kind, r in replies if kind == "query.all_queries"]
    assert all(x.shape[-1] in (32, 48) for r in queries for x in tensors_of(r, "arrays").values())


MATCH = {"exchange.protocol": "server-match"}
NOISE = {"exchange.query-noise": 0.5}


def test_noise_on_queries_has_the_stated_spread(spied):
    def sent(changes: dict, folder: str) -> torch.Tensor:
        replies = spied({**MATCH, **changes}, folder=folder)[2]
        own = [r for kind, r in replies if kind == "query.all_queries"][-3:]
        found = [x.flatten() for r in own for _, x in sorted(tensors_of(r, "arrays").items())]
        return torch.cat(found)

    noise = sent(NOISE, "noisy") - sent({}, "quiet")
    count = noise.numel()
    assert float(noise.std()) == pytest.approx(0.5, rel=5 / (2 * count) ** 0.5)
    assert abs(float(noise.mean())) < 5 * 0.5 / count**0.5


@pytest.mark.parametrize("way", [MATCH, STAGES], ids=["at once", "by stages"])
def test_noise_on_queries_is_seeded_and_changes_the_choice(run, way):
    noisy = outcome(run({**way, **NOISE}))
    assert noisy == outcome(run({**way, **NOISE}))
    assert noisy["recipes"] != outcome(run(way))["recipes"]


@pytest.mark.parametrize("protocol", ["broadcast", "layerwise", "one-shot", "server-match"])
def test_no_message_to_a_target_names_a_sharer(spied, protocol):
    folder, sent, _ = spied({"exchange.protocol": protocol})
    sharers = {s for r in json.loads((folder / "recipes.json").read_text()).values()
               for weights in r.values() for s in weights}  # fmt: skip
    assert sharers
    for message in sent:
        target = message.content.get("envelope", {}).get("user")
        if message.metadata.message_type.startswith("evaluate"):
            assert not any(s in str(message.content) for s in sharers - {target})


def test_a_request_for_a_piece_that_is_not_there_is_refused(run, monkeypatch):
    from fl_perpcs.exchange import asking

    def strange(job, run, gates, population):
        return asking.Asking({next(iter(gates)): ("000099",)}, more=False)

    monkeypatch.setattr(asking, "choose", strange)
    with pytest.raises(PerPcsError, match=r"asks for the piece of sharer number 000099 at"):
        run(ONE_SHOT)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda q: {"nowhere": next(iter(q.values()))}, "queries of the unknown site 'nowhere'"),
        (lambda q: {s: x[:, :-1] for s, x in q.items()}, r"expected finite .* \(batches, 32\)"),
        (lambda q: {s: x * torch.nan for s, x in q.items()}, "expected finite numbers of shape"),
    ],
    ids=["site", "width", "nan"],
)
def test_queries_that_do_not_fit_are_refused(run, monkeypatch, change, told):
    from fl_perpcs.exchange import matching

    honest = matching.all_queries
    monkeypatch.setattr(matching, "all_queries", lambda job: change(honest(job)))
    with pytest.raises(PerPcsError, match=told):
        run({"exchange.protocol": "server-match"})


def test_a_node_that_has_lost_its_state_says_so(run, monkeypatch):
    monkeypatch.setattr(Drawer, "take", lambda self, name: Drawer("other").take_(name))
    monkeypatch.setattr(Drawer, "take_", lambda self, name: _gone(self, name), raising=False)
    with pytest.raises(PerPcsError, match="did not see an earlier message"):
        run(ONE_SHOT)


def _gone(drawer: Drawer, name: str):
    raise PerPcsError("this node did not see an earlier message")


def test_a_drawer_keeps_tensors_and_facts_and_no_users_name_is_in_its_path():
    drawer = Drawer("../../etc", "user/ä")
    drawer.put("x", {"a": torch.arange(3)}, {"n": [1, None]})
    tensors, facts = drawer.take("x")
    assert tensors["a"].tolist() == [0, 1, 2]
    assert facts == {"n": [1, None]}
    assert drawer.folder.resolve().is_relative_to(home().resolve() / "clients")
    assert "etc" not in str(drawer.folder.relative_to(home()))
    drawer.clear()
    assert not drawer.has("x")
    with pytest.raises(PerPcsError, match="did not see an earlier message"):
        drawer.take("x")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({**LAYERWISE, "rerank.items": 4}, r"rerank.items = 4 does not go .*site by site"),
        ({**LAYERWISE, "assembly.per": "history"}, r"assembly.per = 'history' does not go"),
        ({**STAGES, "mixing.per": "site"}, r"mixing.per = 'site' does not go .* no history"),
        ({**STAGES, "assembly.shortlist": 3}, r"assembly.shortlist = 3 does not go"),
        ({"exchange.decoys": 2}, r"exchange.decoys = 2 does nothing .* layerwise and one-shot"),
        ({**ONE_SHOT, "exchange.cache": True}, r"exchange.cache = True does nothing"),
        ({"exchange.query-noise": 0.1}, r"exchange.query-noise = 0.1 does nothing"),
        ({**ONE_SHOT, "exchange.match": "by-stages"}, r"exchange.match = 'by-stages' does nothing"),
        ({"exchange.protocol": "pigeon"}, r"exchange.protocol = 'pigeon': expected 'broadcast'"),
    ],
)
def test_what_a_protocol_cannot_do_is_refused(small_config, changes, told):
    with pytest.raises(ConfigError, match=told):
        load_config(small_config(changes))


def test_replies_tell_how_long_they_took_in_every_phase(run):
    folder = run(LAYERWISE)
    phases = {row["phase"] for row in read_lines(folder / "workers.jsonl")}
    assert {"send gates", "send pieces 1", "evaluate assembled"} <= phases


def test_the_task_adapter_is_sent_to_each_user_once(spied):
    _, sent, _ = spied({**LAYERWISE, "evaluation.references": "base,oppu"})
    first: dict[str, list[bool]] = {}
    for message in sent:
        if "adaptation" in message.content and message.metadata.message_type != "train":
            user = str(message.content["envelope"]["user"])
            first.setdefault(user, []).append("adaptation" in message.content.array_records)
    assert len(first) > 3
    for along in first.values():
        assert along[0] and not any(along[1:])
