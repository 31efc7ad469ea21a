"""Whole runs in this process: every phase, through the client's handlers, without Ray."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_grid import FakeGrid
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from fl_perpcs import client_app, messages, node, server_app, training
from fl_perpcs.assembly import cook
from fl_perpcs.config import ConfigError, load_config
from fl_perpcs.data import open_source
from fl_perpcs.errors import PerPcsError
from fl_perpcs.evaluation import evaluate
from fl_perpcs.export import export_adapter
from fl_perpcs.grid import PhaseError
from fl_perpcs.lm import adapter_digest, load_lm, merge_into_base, put_adapter, site_shapes
from fl_perpcs.messages import ENVELOPE, arrays_of, info_of, open_envelope, unpack_adapter
from fl_perpcs.phases import Phase, evaluation
from fl_perpcs.pieces import load_peft
from fl_perpcs.pool import load_pool
from fl_perpcs.prompts import prompts_of_queries
from fl_perpcs.runs import create_run, read_lines
from fl_perpcs.tasks import load_task

SAME = ("metrics.jsonl", "pool", "recipes.json", "predictions", "results.json", "adaptation")


@pytest.fixture(autouse=True)
def without_report(request, monkeypatch):
    """Drawing takes longer than the run; one test asks for the report."""
    if "report" not in request.node.name:
        monkeypatch.setattr(server_app, "write_report", lambda folder: None)


@pytest.fixture
def fresh_worker(monkeypatch):
    """As in a worker process that has just started."""
    monkeypatch.setattr(node, "_loaded", [])
    monkeypatch.setattr(node, "_loads", 0)


def federation(values: dict, nodes: int = 2, grid_type=FakeGrid) -> Path:
    config = load_config(values)
    grid = grid_type(client_app.app, values, nodes)
    server_app.run_federation(grid, config, create_run(config))
    return Path(config.run.dir)


def main(values: dict, nodes: int = 2, grid_type=FakeGrid) -> None:
    """Run the ServerApp as Flower does."""
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=values)
    server_app.app(grid_type(client_app.app, values, nodes), context)


def what_must_be_the_same(folder: Path) -> dict[str, bytes]:
    files = {}
    for name in SAME:
        path = folder / name
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                files[file.relative_to(folder).as_posix()] = file.read_bytes()
    assert {Path(name).parts[0] for name in files} == set(SAME)
    return files


def phases_of(folder: Path) -> list[str]:
    return list(dict.fromkeys(row["phase"] for row in read_lines(folder / "workers.jsonl")))


def methods_of(folder: Path) -> list[str]:
    return [r["method"] for r in json.loads((folder / "results.json").read_text())["methods"]]


def recipes_of(folder: Path) -> dict:
    return json.loads((folder / "recipes.json").read_text())


@pytest.fixture
def one_run(small_config) -> Path:
    return federation(small_config())


def test_a_run_leaves_a_pool_recipes_predictions_and_results(one_run):
    roles = json.loads((one_run / "results.json").read_text())["roles"]
    assert [len(roles[name]) for name in ("base", "candidates", "targets")] == [3, 4, 3]
    assert methods_of(one_run) == ["base", "assembled", "oppu"]
    assert phases_of(one_run) == [
        "adapt, round 1, train",
        "embed",
        "share",
        "evaluate assembled",
        "evaluate base",
        "evaluate oppu",
    ]
    pool = load_pool(one_run / "pool")
    assert 1 <= len(pool.pieces) <= 3
    assert set(pool.pieces) <= set(roles["candidates"])
    recipes = recipes_of(one_run)
    assert sorted(recipes) == roles["targets"]
    for recipe in recipes.values():
        assert recipe.keys() == pool.spec.shapes.keys()
        for weights in recipe.values():
            assert sum(weights.values()) == pytest.approx(1, abs=1e-6)
            assert weights.keys() <= pool.pieces.keys()
    for method in ("base", "assembled", "oppu"):
        rows = read_lines(one_run / "predictions" / f"{method}.jsonl")
        assert [row["user"] for row in rows] == [u for u in roles["targets"] for _ in range(2)]
        assert all(isinstance(row["prediction"], str) for row in rows)
        for row in rows:
            assert row["query"].startswith(row["user"])
            assert row["gold"] in load_task("movie-tagging").labels


def test_adapters_and_assembly_change_the_loss(one_run):
    rows = json.loads((one_run / "results.json").read_text())["methods"]
    losses = {row["method"]: row["loss"] for row in rows}
    assert len(set(losses.values())) == 3
    tokens = {row["tokens"] for row in read_lines(one_run / "metrics.jsonl") if "tokens" in row}
    assert all(count > 0 for count in tokens)


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_a_run_is_the_same_bytes_whatever_the_number_of_nodes(small_config, one_run, nodes):
    again = federation(small_config(folder="again"), nodes=nodes)
    assert what_must_be_the_same(again) == what_must_be_the_same(one_run)


def test_a_run_is_the_same_bytes_in_a_fresh_worker(small_config, one_run, fresh_worker):
    again = federation(small_config(folder="again"))
    assert what_must_be_the_same(again) == what_must_be_the_same(one_run)


def test_a_run_is_the_same_bytes_when_each_message_meets_a_fresh_worker(small_config, one_run):
    class Forgetful(FakeGrid):
        def answer(self, message):
            node._loaded.clear()
            return super().answer(message)

    again = federation(small_config(folder="again"), grid_type=Forgetful)
    assert what_must_be_the_same(again) == what_must_be_the_same(one_run)


def test_a_run_is_the_same_bytes_when_messages_are_sent_one_by_one(small_config, one_run):
    again = federation(small_config({"run.window": 1}, folder="again"))
    assert what_must_be_the_same(again) == what_must_be_the_same(one_run)


def test_another_seed_is_another_run(small_config, one_run):
    other = federation(small_config({"seed": 1}, folder="other"))
    assert what_must_be_the_same(other) != what_must_be_the_same(one_run)


def test_the_base_llm_is_loaded_once_in_a_worker_and_adapted_there(small_config, fresh_worker):
    folder = federation(small_config())
    rows = read_lines(folder / "workers.jsonl")
    assert {row["lm-loads"] for row in rows} == {1}
    assert all(row["seconds"] > 0 for row in rows)
    # The adapted base is not the plain one: pieces say so.
    assert "+" in load_pool(folder / "pool").fingerprint


def test_every_training_job_has_a_seed_of_its_own(small_config, monkeypatch):
    seeds, batches = [], training._batches

    def spy(encoded, size, pad, seed):
        seeds.append(seed)
        return batches(encoded, size, pad, seed)

    monkeypatch.setattr(training, "_batches", spy)
    federation(small_config({"adaptation.rounds": 2, "sharers.selection": "random"}))
    # Two rounds of 3 base users, adapters and gates of 3 sharers, adapters of 3 targets.
    assert len(seeds) == len(set(seeds)) == 6 + 6 + 3


def test_a_report_is_written(small_config):
    folder = federation(small_config())
    assert (folder / "report.html").stat().st_size > 10_000


def test_users_see_messages_about_themselves_only(small_config):
    grids: list[FakeGrid] = []

    class Kept(FakeGrid):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            grids.append(self)

    folder = federation(small_config(), nodes=3, grid_type=Kept)
    everyone = set(json.loads((folder / "results.json").read_text())["history"])
    sharers = set(load_pool(folder / "pool").pieces)
    named = 0
    for message in grids[0].sent:
        if message.metadata.message_type == "query.hello":
            continue
        user, _ = open_envelope(message)
        named += 1
        # Whose a piece is is part of the pool; nobody else is named.
        known = {user} | (sharers if "pool" in message.content else set())
        text = str({k: dict(r) for k, r in message.content.config_records.items()})
        assert {u for u in everyone if u in text} <= known
        hosted = node.hosted_users(
            open_source(load_config(small_config())),
            grids[0].contexts[message.metadata.dst_node_id],
        )
        assert user in hosted
    assert named > 10


def test_without_adaptation_nothing_is_adapted(small_config, fresh_worker):
    values = small_config({"adaptation.mode": "none", "roles.base": 0})
    folder = federation(values)
    assert not (folder / "adaptation").exists()
    assert phases_of(folder)[0] == "embed"
    assert load_pool(folder / "pool").fingerprint == load_lm(load_config(values)).fingerprint


def test_a_loaded_adaptation_is_what_every_worker_merges(small_config, tiny_folder, tmp_path):
    torch.manual_seed(0)
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_folder),
        LoraConfig(
            r=3,
            lora_alpha=6,
            target_modules=["q_proj"],
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        ),
    ).save_pretrained(str(tmp_path / "task"))
    values = small_config({"adaptation.mode": "load", "adaptation.adapter": str(tmp_path / "task")})
    folder = federation(values)
    assert phases_of(folder)[0] == "embed"
    saved, scale = load_peft(folder / "adaptation")
    loaded, other_scale = load_peft(tmp_path / "task")
    assert scale == other_scale == 2.0
    assert adapter_digest(saved) == adapter_digest(loaded)
    lm = load_lm(load_config(values))
    merge_into_base(lm, loaded)
    assert load_pool(folder / "pool").fingerprint == lm.fingerprint


def test_a_run_goes_on_from_another_runs_adaptation_and_pool(small_config, one_run):
    values = small_config(
        {
            "adaptation.mode": "load",
            "adaptation.adapter": str(one_run / "adaptation"),
            "sharers.pool": str(one_run / "pool"),
        },
        folder="second",
    )
    second = federation(values)
    assert "share" not in phases_of(second)
    for name in ("recipes.json", "predictions/assembled.jsonl", "pool/manifest.json"):
        assert (second / name).read_bytes() == (one_run / name).read_bytes()


def test_a_pool_of_another_base_llm_is_refused_before_anyone_is_evaluated(small_config, one_run):
    values = small_config(
        {"adaptation.mode": "none", "sharers.pool": str(one_run / "pool")}, folder="second"
    )
    with pytest.raises(PhaseError, match="trained on base LLM"):
        federation(values)
    assert not (Path(values["run.dir"]) / "predictions").exists()


def test_a_pool_of_another_rank_is_refused(small_config, one_run):
    values = small_config({"lora.rank": 3, "sharers.pool": str(one_run / "pool")}, folder="second")
    with pytest.raises(PerPcsError, match="pieces of rank 2"):
        federation(values)


@pytest.mark.parametrize("name", ["FedProx", "FedMedian", "FedAdam", "Krum"])
def test_the_task_adapter_is_trained_by_any_strategy_of_flower(small_config, name):
    values = small_config(
        {
            "adaptation.strategy": f"flwr.serverapp.strategy:{name}",
            "adaptation.rounds": 2,
            "adaptation.fraction-evaluate": 1.0,
            "evaluation.references": "base",
            "sharers.selection": "random",
        }
    )
    folder = federation(values)
    adapter, _ = load_peft(folder / "adaptation")
    assert all(f.B.any() and torch.isfinite(f.B).all() for f in adapter.values())
    assert phases_of(folder)[:4] == [
        f"adapt, round {number}, {action}" for number in (1, 2) for action in ("train", "evaluate")
    ]
    rows = [r for r in read_lines(folder / "metrics.jsonl") if "eval-loss" in r]
    assert len(rows) == 6


class LastWins(FedAvg):
    """A strategy of the user's own."""

    def aggregate_train(self, server_round, replies):
        return list(replies)[-1].content["arrays"], None


def own_adaptation(**options) -> LastWins:
    return LastWins(**options)


@pytest.fixture
def importable(monkeypatch):
    """This module under a name that an import path can give."""
    monkeypatch.setitem(sys.modules, "federation_tests", sys.modules[__name__])
    return "federation_tests"


def test_the_task_adapter_is_trained_by_a_strategy_of_ones_own(small_config, importable):
    changes = {"evaluation.references": "base", "sharers.selection": "random"}
    path = {"adaptation.strategy": f"{importable}:own_adaptation"}
    own = federation(small_config(changes | path, folder="own"))
    average = federation(small_config(changes, folder="average"))
    first, second = (load_peft(f / "adaptation")[0] for f in (own, average))
    assert first.keys() == second.keys()
    assert adapter_digest(first) != adapter_digest(second)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("flwr.serverapp.strategy:FedNothing", "cannot be imported"),
        ("no.such.module:X", "cannot be imported"),
        ("flwr.serverapp.strategy:FedXgbCyclic.nothing", "cannot be imported"),
        ("builtins:dict", "cannot be built"),
        ("collections:Counter", "is no"),
    ],
)
def test_an_adaptation_strategy_that_cannot_be_used_is_named(small_config, path, told):
    values = small_config({"adaptation.strategy": path, "evaluation.references": "base"})
    with pytest.raises(PerPcsError, match=f"adaptation.strategy = '{path}' {told}"):
        federation(values)


def test_a_delta_merge_is_exact_and_of_a_higher_rank(small_config):
    folder = federation(small_config({"assembly.merge": "delta"}))
    pool = load_pool(folder / "pool")
    for recipe in recipes_of(folder).values():
        adapter = cook(recipe, pool.stacks(), "delta")
        for site, weights in recipe.items():
            assert adapter[site].A.shape[0] == 2 * len(weights)


@pytest.mark.parametrize("merge", ["factor", "delta"])
@pytest.mark.parametrize("mode", ["federated", "none"])
def test_an_exported_adapter_scores_as_the_run_says(small_config, tmp_path, merge, mode):
    values = small_config(
        {"assembly.merge": merge, "adaptation.mode": mode, "evaluation.references": ""}
    )
    folder = federation(values)
    config, user = load_config(values), sorted(recipes_of(folder))[0]
    adapter, scale = load_peft(export_adapter(folder, user, tmp_path / "out"))
    assert scale == pytest.approx(2.0)
    lm = load_lm(config)
    put_adapter(lm, adapter)
    source = open_source(config)
    queries = source.user(user).queries
    result = evaluate(
        lm,
        source.task,
        prompts_of_queries(queries, [], source.task),
        [query.output for query in queries],
        config.evaluation,
        max_length=64,
        seed=0,
    )
    (row,) = [r for r in read_lines(folder / "metrics.jsonl") if r["user"] == user]
    assert result.metrics["loss"] == pytest.approx(row["loss"], abs=1e-4)


def test_a_sharer_shares_the_wanted_share_of_its_pieces(small_config):
    folder = federation(small_config({"sharers.ratio": 0.5, "sharers.selection": "random"}))
    pool = load_pool(folder / "pool")
    assert [len(pieces) for pieces in pool.pieces.values()] == [4, 4, 4]
    chosen = {tuple(sorted(p.site for p in pieces)) for pieces in pool.pieces.values()}
    assert len(chosen) > 1
    for recipe in recipes_of(folder).values():
        assert recipe.keys() == pool.stacks().keys()


@pytest.mark.parametrize(("init", "same"), [("shared", True), ("own", False)])
def test_adapters_start_from_one_a_or_from_one_of_their_own(small_config, init, same):
    folder = federation(
        small_config(
            {
                "lora.init": init,
                "adapter.lr": 1e-9,
                "evaluation.references": "base",
                "sharers.selection": "random",
            }
        )
    )
    for stack in load_pool(folder / "pool").stacks().values():
        spread = (stack.A[0] - stack.A[1]).abs().max().item()
        assert (spread < 1e-6) is same


@pytest.mark.parametrize("selection", ["top-p", "sample", "sample-top-p"])
def test_other_selections_are_reproducible_too(small_config, selection):
    changes = {
        "assembly.selection": selection,
        "assembly.top-p": 0.5,
        "assembly.sample-top-k": 3,
        "evaluation.references": "",
        "adaptation.mode": "none",
    }
    first = federation(small_config(changes, folder="first"))
    second = federation(small_config(changes, folder="second"), nodes=3)
    assert recipes_of(first) == recipes_of(second)
    assert recipes_of(first)


@pytest.mark.parametrize("selection", ["k-means", "most-active", "random"])
def test_every_way_to_select_sharers_fills_a_pool(small_config, selection):
    folder = federation(
        small_config(
            {
                "sharers.selection": selection,
                "evaluation.references": "base",
                "evaluation.answers": "none",
                "adaptation.mode": "none",
            }
        )
    )
    results = json.loads((folder / "results.json").read_text())
    sharers = set(load_pool(folder / "pool").pieces)
    assert ("embed" in phases_of(folder)) is (selection == "k-means")
    assert sharers <= set(results["roles"]["candidates"])
    if selection != "k-means":
        assert len(sharers) == 3
    if selection == "most-active":
        (left,) = set(results["roles"]["candidates"]) - sharers
        assert all(results["history"][left] <= results["history"][user] for user in sharers)
    assert results["main_metric"] == "loss"
    assert "prediction" not in read_lines(folder / "predictions" / "base.jsonl")[0]


def test_ranked_answers_are_labels_and_results_say_how_they_were_made(small_config):
    changes = {"evaluation.answers": "rank", "evaluation.resamples": 50}
    folder = federation(small_config({**changes, "evaluation.references": "base,oppu"}))
    results = json.loads((folder / "results.json").read_text())
    task = load_task("movie-tagging")
    assert (results["task"], results["answers"]) == ("movie-tagging", "rank")
    assert results["labels"] == list(task.labels)
    for row in results["methods"]:
        rows = read_lines(folder / "predictions" / f"{row['method']}.jsonl")
        assert {answer["prediction"] for answer in rows} <= set(task.labels)
        assert list(row["by_user"]) == results["roles"]["targets"]
        assert row["intervals"].keys() == {"accuracy", "f1", "loss"}
        low, high = row["intervals"]["loss"]
        assert low < row["loss"] < high
        assert row["dropped"] == 0


@pytest.mark.parametrize(
    ("references", "methods"),
    [
        ("", ["assembled"]),
        ("oppu", ["assembled", "oppu"]),
        ("oppu,base", ["base", "assembled", "oppu"]),
    ],
)
def test_only_the_wanted_references_are_evaluated(small_config, references, methods):
    changes = {"evaluation.references": references, "adaptation.mode": "none"}
    assert methods_of(federation(small_config(changes))) == methods


def test_sampled_answers_are_reproducible(small_config):
    changes = {
        "evaluation.temperature": 5.0,
        "evaluation.references": "base",
        "sharers.selection": "random",
        "adaptation.mode": "none",
    }
    folders = [federation(small_config(changes, folder=f)) for f in ("first", "second")]
    texts = [(f / "predictions" / "base.jsonl").read_bytes() for f in folders]
    assert texts[0] == texts[1]
    greedy = federation(small_config(changes | {"evaluation.temperature": 0.0}, folder="greedy"))
    assert (greedy / "predictions" / "base.jsonl").read_bytes() != texts[0]


def test_only_the_last_items_of_a_history_are_used_when_it_is_limited(small_config):
    changes = {"evaluation.references": "base", "sharers.selection": "random"}
    folder = federation(small_config(changes | {"roles.max-history": 4}))
    rows = [r for r in read_lines(folder / "metrics.jsonl") if "num-examples" in r]
    assert len(rows) == 6
    assert {row["num-examples"] for row in rows} == {4}


def broken_for(phase: str):
    class Broken(FakeGrid):
        def answer(self, message):
            if message.metadata.message_type == phase:
                message.content[ENVELOPE]["user"] = "user-9999"
            return super().answer(message)

    return Broken


@pytest.mark.parametrize("phase", ["train", "query.embed", "train.share", "evaluate.oppu"])
def test_a_client_that_raises_ends_the_run_with_one_clear_error(small_config, phase):
    values = small_config()
    with pytest.raises(PhaseError, match=r"phase '.*': user 'user-00\d\d' failed: this node does"):
        main(values, grid_type=broken_for(phase))
    events = read_lines(Path(values["run.dir"]) / "events.jsonl")
    assert [e["status"] for e in events if e["event"] == "run"] == ["started", "failed"]
    assert events[-1]["message"].startswith("phase '")
    assert "does not host user 'user-9999" in events[-1]["message"]
    assert not (Path(values["run.dir"]) / "results.json").exists()


def test_a_run_that_goes_well_says_so(small_config):
    values = small_config({"evaluation.references": "base", "adaptation.mode": "none"})
    main(values)
    events = read_lines(Path(values["run.dir"]) / "events.jsonl")
    assert [e["status"] for e in events if e["event"] == "run"] == ["started", "completed"]
    last = {e["phase"]: (e["done"], e["total"]) for e in events if e["event"] == "phase"}
    assert last["evaluate base"] == (3, 3)


def test_a_run_folder_is_not_used_twice(small_config):
    values = small_config({"evaluation.references": "base", "adaptation.mode": "none"})
    federation(values)
    with pytest.raises(PerPcsError, match="already holds a run"):
        federation(values)


def test_a_client_of_another_source_is_refused(small_config, monkeypatch):
    here = messages.source_digest()
    digests: Iterator[str] = iter([here] + ["another"] * 1000)
    monkeypatch.setattr(messages, "source_digest", lambda: next(digests))
    with pytest.raises(PhaseError, match="this client's source is another"):
        federation(small_config())


def test_nodes_that_join_late_are_waited_for(small_config, one_run, monkeypatch):
    class Growing(FakeGrid):
        asked = 0

        def get_node_ids(self):
            self.asked += 1
            return super().get_node_ids()[: self.asked // 2]

    again = federation(small_config(folder="again"), nodes=4, grid_type=Growing)
    assert what_must_be_the_same(again) == what_must_be_the_same(one_run)


def test_nodes_that_never_join_are_a_timeout(small_config):
    class Missing(FakeGrid):
        def get_node_ids(self):
            return super().get_node_ids()[:2]

    with pytest.raises(PhaseError, match="not all of 3 nodes answered"):
        federation(small_config({"run.timeout": 0.2}), nodes=3, grid_type=Missing)


def test_no_node_at_all_is_a_timeout(small_config):
    class Empty(FakeGrid):
        def get_node_ids(self):
            return []

    with pytest.raises(PhaseError, match="hello"):
        federation(small_config({"run.timeout": 0.2}), grid_type=Empty)


def test_two_nodes_with_the_same_users_are_refused(small_config):
    class Twins(FakeGrid):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            for context in self.contexts.values():
                context.node_config["partition-id"] = 0

    with pytest.raises(PerPcsError, match="two nodes host user"):
        federation(small_config(), grid_type=Twins)


def test_a_federation_that_hosts_too_few_users_is_refused(small_config):
    values = small_config()
    grid = FakeGrid(client_app.app, {**values, "data.users": 9, "roles.base": 2}, 2)
    config = load_config(values)
    with pytest.raises(PerPcsError, match="= 10 users, but there are 9"):
        server_app.run_federation(grid, config, create_run(config))


def everybody_shares(setting) -> Iterator[Phase]:
    """Collect everybody's pieces and evaluate the base LLM: a strategy in a few lines."""
    fingerprints = []

    def collect(user, reply):
        assert user in setting.roles.candidates
        fingerprints.append(info_of(reply)["base"])
        assert list(unpack_adapter(arrays_of(reply))) == list(setting.spec.shapes)

    yield Phase("everybody shares", "train.share", setting.roles.candidates, collect)
    assert len(fingerprints) == len(setting.roles.candidates)
    yield evaluation(setting, "theirs", action="base")


@pytest.mark.parametrize("mode", ["federated", "none"])
def test_a_strategy_of_ones_own_runs_by_its_import_path(small_config, importable, mode):
    name = f"{importable}:everybody_shares"
    folder = federation(small_config({"strategy.name": name, "adaptation.mode": mode}))
    assert phases_of(folder)[-4:] == [
        "everybody shares",
        "evaluate theirs",
        "evaluate base",
        "evaluate oppu",
    ]
    assert methods_of(folder) == ["base", "theirs", "oppu"]


@pytest.mark.parametrize("name", ["per-pieces", "no.module:Strategy", "fl_perpcs.grid:Nothing"])
def test_an_unknown_strategy_is_named_before_anyone_is_asked(small_config, name):
    class Untouched(FakeGrid):
        def get_node_ids(self):
            raise AssertionError("nobody is to be asked")

    with pytest.raises(PerPcsError, match=f"strategy.name = '{name}'"):
        federation(small_config({"strategy.name": name}), grid_type=Untouched)


def test_a_config_that_cannot_be_run_creates_no_folder(small_config):
    values = small_config({"lora.rank": 0})
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        main(values)
    assert not Path(values["run.dir"]).exists()


def test_modules_that_the_base_llm_lacks_are_named(small_config):
    with pytest.raises(PerPcsError, match=r"lora\.target-modules = 'c_attn' does not fit"):
        federation(small_config({"lora.target-modules": "c_attn"}))


def test_a_base_llm_that_is_not_there_is_named(small_config, tmp_path):
    with pytest.raises(PerPcsError, match=r"lm\.name"):
        federation(small_config({"lm.name": str(tmp_path / "nowhere")}))
    with pytest.raises(PerPcsError, match="perpcs fetch smollm2"):
        federation(small_config({"lm.name": "smollm2"}, folder="other"))


def test_sites_are_found_without_loading_a_weight(small_config):
    config = load_config(small_config())
    lm = load_lm(config)
    assert list(site_shapes(config)) == list(lm.sites)
    assert len(lm.sites) == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_in_half_precision_keeps_float32_pieces(small_config, dtype):
    folder = federation(small_config({"lm.dtype": dtype, "evaluation.references": ""}))
    for stack in load_pool(folder / "pool").stacks().values():
        assert stack.A.dtype == stack.gates.dtype == torch.float32
