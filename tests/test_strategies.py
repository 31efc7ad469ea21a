"""Every strategy in a whole run, and what each must be true of whatever the data."""

import json
from pathlib import Path

import pytest
import torch
from fake_grid import FakeGrid
from hypothesis import given, settings
from hypothesis import strategies as st
from test_federation import federation, recipes_of

from fl_perpcs import client_app, server_app, users
from fl_perpcs.assembly import cook
from fl_perpcs.config import Config, load_config
from fl_perpcs.data import open_source
from fl_perpcs.errors import PerPcsError
from fl_perpcs.export import export_adapter
from fl_perpcs.lm import initial_adapter, load_lm, merge_into_base, put_adapter, site_shapes
from fl_perpcs.messages import arrays_of, unpack_adapter
from fl_perpcs.node import Job
from fl_perpcs.pieces import Adapter, Factors, load_peft
from fl_perpcs.pool import Pool, load_pool
from fl_perpcs.runs import create_run, read_lines
from strategies import REGISTRY
from strategies.flora import stacked

TUNING = {"tuning.steps": 3, "tuning.batch-size": 2}
HISTORY = 1000  # stands for the history items of a target
ROUNDS = {"averaging.rounds": 2, "averaging.steps": 2, "averaging.batch-size": 2}


pytestmark = pytest.mark.usefixtures("without_report")


def changes_for(name: str, tmp_path) -> dict:
    changes = {"strategy.name": name, **ROUNDS, "lorahub.evaluations": 7, "lorahub.items": 4}
    if name == "rag":
        changes["prompts.retrieve"] = 1
    if name == "pag":
        profiles = {f"user-{i:04d}": "likes comedy" for i in range(11)}
        (tmp_path / "profiles.json").write_text(json.dumps(profiles))
        changes["prompts.profiles"] = str(tmp_path / "profiles.json")
    return changes


def spied(values: dict):
    """Run and return the config and every message that the server sent."""
    config = load_config(values)
    grid = FakeGrid(client_app.app, values, 2)
    server_app.run_federation(grid, config, create_run(config))
    return config, grid.sent


def sent_of(messages, kind: str) -> list:
    return [message for message in messages if message.metadata.message_type == kind]


def given_adapter(messages) -> Adapter:
    return unpack_adapter(arrays_of(sent_of(messages, "evaluate.given")[0], "adapter"))


def adapted_job(config, user: str, phase: str) -> Job:
    lm = load_lm(config)
    merge_into_base(lm, load_peft(folder_of(config) / "adaptation")[0])
    source = open_source(config)
    return Job(config, source.user(user), phase, lm, source)


def folder_of(config: Config) -> Path:
    return Path(config.run.dir)


def same(first: Adapter, second: Adapter) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(a, b) for s in first for a, b in zip(first[s], second[s], strict=True)
    )


@pytest.mark.parametrize("name", REGISTRY)
def test_every_strategy_runs_and_again_gives_the_same_bytes(name, small_config, tmp_path):
    changes = changes_for(name, tmp_path)
    folders = [federation(small_config(changes, folder)) for folder in ("one", "two")]
    for file in ("results.json", "metrics.jsonl"):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()
    rows = json.loads((folders[0] / "results.json").read_text())["methods"]
    method = {"per-pcs": "assembled"}.get(name, name)
    expected = ["base", *([method] if name not in ("base", "oppu") else []), "oppu"]
    assert [row["method"] for row in rows] == expected
    assert all(row["users"] == 3 and row["loss"] > 0 for row in rows)
    answers = folders[0] / "predictions" / f"{method}.jsonl"
    assert len(read_lines(answers)) == 3 * 2


def test_fedavg_with_one_client_is_local_training(small_config):
    changes = {"sharers.count": 1, "averaging.rounds": 1, "averaging.steps": 3}
    config, sent = spied(small_config({**changes, "strategy.name": "fedavg-lora"}))
    (message,) = sent_of(sent, "train.average")
    user = str(message.content["envelope"]["user"])
    job = adapted_job(config, user, "average, round 1, train")
    adapter, _ = users.train_round(job, job.start_adapter(), "AB")
    assert same(given_adapter(sent), adapter)


def test_fedavg_of_several_is_the_mean_weighted_by_history(small_config):
    config, sent = spied(small_config({"strategy.name": "fedavg-lora", "averaging.rounds": 1}))
    trained = []
    for message in sent_of(sent, "train.average"):
        user = str(message.content["envelope"]["user"])
        job = adapted_job(config, user, "average, round 1, train")
        trained.append((len(job.history), users.train_round(job, job.start_adapter(), "AB")[0]))
    assert len(trained) > 1
    whole = sum(items for items, _ in trained)
    for site, factors in given_adapter(sent).items():
        for name in "AB":
            mean = sum(items / whole * getattr(a[site], name) for items, a in trained)
            torch.testing.assert_close(getattr(factors, name), mean, atol=1e-6, rtol=1e-5)


def test_ffa_lora_never_changes_or_sends_a(small_config):
    config, sent = spied(small_config({"strategy.name": "ffa-lora", **ROUNDS}))
    for message in sent_of(sent, "train.average"):
        names = list(message.content.array_records["arrays"])
        assert names and all(name.endswith(".lora_B") for name in names)
    start = initial_adapter(site_shapes(config), config.lora.rank, config.seed)
    for site, (A, B) in given_adapter(sent).items():
        assert torch.equal(A, start[site].A)
        assert B.abs().sum() > 0


def test_fedsa_lora_shares_a_alone_and_gives_each_its_own_b_back(small_config, monkeypatch):
    train, rounds = users.train_round, {}

    def spy(job, received, factors):
        adapter, loss = train(job, received, factors)
        rounds.setdefault(job.user.id, []).append((received, adapter))
        return adapter, loss

    monkeypatch.setattr(users, "train_round", spy)
    config, sent = spied(small_config({"strategy.name": "fedsa-lora", **ROUNDS}))
    for message in sent_of(sent, "train.average"):
        arrays = message.content.array_records
        assert all(n.endswith(".lora_A") for n in arrays["arrays"])
        assert not any(n.endswith(".lora_B") for n in arrays)
    assert len(rounds) > 1
    for (first, trained), (second, _) in rounds.values():
        for site in first:
            assert not first[site].B.any()
            assert trained[site].B.any()
            assert torch.equal(second[site].B, trained[site].B)
            assert not torch.equal(second[site].A, trained[site].A)  # the mean's
    (_, one), _ = rounds.popitem()[1]
    (_, other), _ = rounds.popitem()[1]
    assert any(not torch.equal(one[site].B, other[site].B) for site in one)
    # What a target is given has no B: it trains its own.
    assert all(not B.any() for _, B in given_adapter(sent).values())
    rows = [r for r in read_lines(folder_of(config) / "metrics.jsonl") if "loss" in r]
    trained = {r["trained-parameters"] for r in rows if r["phase"] == "evaluate fedsa-lora"}
    assert trained == {sum(B.numel() for _, B in given_adapter(sent).values())}


adapters = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=5)


@given(adapters, st.integers(0, 2**31))
@settings(deadline=None)
def test_floras_stack_is_the_weighted_sum_of_the_parts(parts, seed):
    random = torch.Generator().manual_seed(seed)
    found = [
        (
            float(items),
            {"site": Factors(*(torch.randn(*s, generator=random) for s in ((r, 6), (5, r))))},
        )
        for items, r in parts
    ]
    total = stacked(found)["site"]
    assert total.A.shape[0] == sum(rank for _, rank in parts)
    whole = sum(items for items, _ in found)
    expected = sum(items / whole * (a["site"].B @ a["site"].A) for items, a in found)
    torch.testing.assert_close(total.B @ total.A, expected, atol=1e-4, rtol=1e-4)


def test_flora_trains_each_round_on_what_the_rounds_before_came_to(small_config):
    config, sent = spied(small_config({"strategy.name": "flora", **ROUNDS}))
    rounds = {}
    for message in sent_of(sent, "train.average"):
        number = 1 if "round 1" in str(message.content["envelope"]["phase"]) else 2
        rounds[number] = unpack_adapter(arrays_of(message, "adaptation"))
    task = load_peft(folder_of(config) / "adaptation")[0]
    site = next(iter(task))
    ranks = {number: adapter[site].A.shape[0] for number, adapter in rounds.items()}
    sharers = len(sent_of(sent, "train.average")) // 2
    assert ranks == {1: 2, 2: 2 + 2 * sharers}
    total = given_adapter(sent)[site]
    assert total.A.shape[0] == 2 * 2 * sharers
    assert torch.equal(rounds[2][site].A[2:], total.A[: 2 * sharers])


def test_retrieval_of_a_sharers_own_history_finds_itself(small_config):
    config = load_config(small_config())
    lm, source = load_lm(config), open_source(config)
    names = source.user_ids()[:5]
    jobs = {name: Job(config, source.user(name), "embed", lm, source) for name in names}
    embeddings = {name: users.history_embedding(job) for name, job in jobs.items()}
    for name, job in jobs.items():
        put_adapter(lm, {})
        assert users.nearest_sharer(job, embeddings) == name


def test_retrieval_gives_each_target_one_whole_adapter(small_config):
    folder = federation(small_config({"strategy.name": "retrieval"}))
    sharers = set(load_pool(folder / "pool").pieces)
    for recipe in recipes_of(folder).values():
        (choice,) = {tuple(weights.items()) for weights in recipe.values()}
        assert choice[0][1] == 1.0 and choice[0][0] in sharers


def test_the_pool_mean_is_order_free(small_config, tmp_path):
    config, sent = spied(small_config({"strategy.name": "pool-mean"}))
    mean = given_adapter(sent)
    pool = load_pool(folder_of(config) / "pool")
    assert len(pool.pieces) > 1
    backwards = Pool(pool.spec, pool.fingerprint, dict(reversed(pool.pieces.items())))
    stacks = backwards.stacks()
    recipe = {site: dict.fromkeys(s.sharers, 1 / len(s.sharers)) for site, s in stacks.items()}
    assert same(mean, cook(recipe, stacks, "factor"))
    for site, factors in mean.items():
        pieces = [p for found in pool.pieces.values() for p in found if p.site == site]
        expected = torch.stack([p.B for p in pieces]).mean(dim=0)
        torch.testing.assert_close(factors.B, expected, atol=1e-6, rtol=1e-5)


def test_fewer_sharers_of_a_borrowed_pool_are_a_part_of_more(small_config):
    first = federation(small_config({"evaluation.references": ""}))
    whole = load_pool(first / "pool")
    assert len(whole.pieces) == 3
    borrowing = {
        "adaptation.mode": "load",
        "adaptation.adapter": str(first / "adaptation"),
        "sharers.pool": str(first / "pool"),
        "evaluation.references": "",
    }
    sizes = {}
    for count in (1, 2, 3):
        changes = {**borrowing, "sharers.count": count}
        folder = federation(small_config(changes, folder=f"of {count}"))
        sizes[count] = set(load_pool(folder / "pool").pieces)
        assert len(sizes[count]) == count
    assert sizes[1] < sizes[2] < sizes[3] == set(whole.pieces)


@pytest.mark.parametrize(
    ("changes", "costs"),
    [
        ({"strategy.name": "base"}, (0, 0, 0, 0)),
        ({"strategy.name": "oppu"}, (4, 4, 1024, 4096)),
        ({"strategy.name": "pool-mean"}, (0, 0, 0, 0)),
        ({"strategy.name": "retrieval"}, (HISTORY, 0, 0, 8 * 8)),
        ({"strategy.name": "fedavg-lora-tuned"}, (4, 4, 1024, 4096)),
        ({}, (HISTORY, 0, 0, None)),
        ({"tuning.factors": "B", **TUNING}, (HISTORY + 6, 6, 512, 4096)),
    ],
)
def test_what_a_target_pays_is_reported(small_config, changes, costs):
    folder = federation(small_config({**changes, "evaluation.references": "", **ROUNDS}))
    results = json.loads((folder / "results.json").read_text())
    (row,) = results["methods"]
    found = row["costs"]
    histories = [results["history"][user] for user in results["roles"]["targets"]]
    looked_at = sum(histories) / 3 if costs[0] >= HISTORY else 0
    assert found["forward-examples"] == pytest.approx(looked_at + costs[0] % HISTORY)
    assert found["backward-examples"] == costs[1]
    assert found["trained-parameters"] == costs[2]
    if costs[3] is not None:
        assert found["stored-bytes"] == costs[3]
    else:
        weights = [w for r in recipes_of(folder).values() for w in r.values()]
        assert found["stored-bytes"] == 8 * sum(map(len, weights)) / 3


def test_a_tuned_adapter_is_not_exported_as_its_recipe(small_config, tmp_path):
    folder = federation(small_config({"tuning.factors": "AB", "tuning.steps": 1}))
    user = next(iter(recipes_of(folder)))
    with pytest.raises(PerPcsError, match="fine-tuned their adapters"):
        export_adapter(folder, user, tmp_path / "out")
