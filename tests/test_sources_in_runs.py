"""Sources, prompts and ways of answering in whole federations without Ray."""

import json
from pathlib import Path

import pytest
from fake_grid import FakeGrid
from flwr.app import Context, RecordDict

from fl_perpcs import client_app, server_app
from fl_perpcs.config import ConfigError, load_config
from fl_perpcs.data import open_source
from fl_perpcs.errors import PerPcsError
from fl_perpcs.lm import load_tokenizer
from fl_perpcs.runs import read_lines
from fl_perpcs.tasks import load_task

FILES = Path(__file__).parent / "lamp"
SIX = {
    "data.queries": 0,
    "lm.max-length": 512,
    "roles.base": 2,
    "roles.candidates": 2,
    "roles.targets": 2,
    "sharers.count": 2,
}


def federation(values: dict) -> Path:
    context = Context(1, 1, {}, RecordDict(), values)
    server_app.app(FakeGrid(client_app.app, values, 2), context)
    return Path(str(values["run.dir"]))


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture
def movies(small_config):
    """Six users of LaMP-2M in LaMP's own files."""
    path = str(FILES / "lamp-2m")
    own = {**SIX, "data.source": "lamp", "data.task": "lamp-2m", "data.path": path}
    return lambda changes=None, **kwargs: small_config({**own, **(changes or {})}, **kwargs)


def test_retrieved_items_and_profiles_change_what_is_computed(movies, tmp_path):
    profiles = tmp_path / "profiles.json"
    users = ["q-0", *(f"q-{n}0" for n in range(2, 7))]
    profiles.write_text(json.dumps(dict.fromkeys(users, "dystopia and action")))
    changes = {
        "plain": {},
        "rag": {"prompts.retrieve": 1},
        "pag": {"prompts.profiles": str(profiles)},
        "both": {"prompts.retrieve": 2, "prompts.profiles": str(profiles)},
    }
    losses = {
        name: tuple(
            row["loss"] for row in results_of(federation(movies(values, folder=name)))["methods"]
        )
        for name, values in changes.items()
    }
    assert len(set(losses.values())) == 4


def test_ranked_answers_are_labels_and_are_named(movies):
    folder = federation(movies({"evaluation.answers": "rank"}))
    assert results_of(folder)["answers"] == "rank"
    rows = read_lines(folder / "predictions" / "base.jsonl")
    assert {row["prediction"] for row in rows} <= set(load_task("lamp-2m").labels)


def test_labels_of_a_task_without_any_cannot_be_ranked(small_config):
    own = {"data.source": "lamp", "data.task": "lamp-7", "data.path": str(FILES / "lamp-7")}
    with pytest.raises(ConfigError, match="the task 'lamp-7' has no labels to rank"):
        federation(small_config({**SIX, **own, "evaluation.answers": "rank"}))


def test_a_cold_start_cuts_the_targets_histories_alone(movies):
    folder = federation(movies({"roles.target-history": 1, "assembly.batch-size": 1}))
    other = federation(movies({"assembly.batch-size": 1}, folder="other"))
    pools = [
        {path.name: path.read_bytes() for path in (f / "pool").rglob("*") if path.is_file()}
        for f in (folder, other)
    ]
    assert pools[0] == pools[1] != {}
    cut, whole = (results_of(f)["methods"] for f in (folder, other))
    assert cut[0]["loss"] == whole[0]["loss"]  # the base LLM sees no history
    assert cut[1]["loss"] != whole[1]["loss"]
    assert cut[2]["loss"] != whole[2]["loss"]


def test_base_users_can_train_on_their_queries(movies):
    adapters = []
    for which in ("history", "queries", "both"):
        folder = federation(movies({"adaptation.examples": which}, folder=which))
        rows = [r for r in read_lines(folder / "metrics.jsonl") if "train-loss" in r]
        adapters.append([row["num-examples"] for row in rows])
    history, queries, both = adapters
    assert both == [h + q for h, q in zip(history, queries, strict=True)]
    assert history == [3, 3]


def test_what_is_too_long_is_counted(movies):
    source = open_source(load_config(movies()))
    tokenizer = load_tokenizer(load_config(movies()))
    users = [source.user(user) for user in source.user_ids()]
    longest = {
        user.id: [len(tokenizer(" " + item.output)["input_ids"]) for item in user.history]
        for user in users
    }
    # Room for the instruction, one token of input, and responses of one word.
    template = len(tokenizer(source.task.prompt(""))["input_ids"])
    limit = template + 3
    found = results_of(federation(movies({"lm.max-length": limit, "adaptation.mode": "none"})))
    too_long = sum(n > 1 for user in found["roles"]["targets"] for n in longest[user])
    assert found["history_dropped"].get("evaluate base", 0) == too_long > 0


@pytest.fixture
def published(small_config, tmp_path):
    """A folder as Per-Pcs was published with: three base users, two candidates, two targets."""

    def user(name: int) -> dict:
        item = {"description": f"film {name}", "tag": "comedy"}
        question = "tags: [comedy] description: a boxer"
        return {
            "user_id": name,
            "profile": [item, {**item, "description": "a robot"}],
            "query": [{"id": f"{name}-q", "input": question, "gold": "comedy"}],
        }

    (tmp_path / "data" / "test_100").mkdir(parents=True)
    files = {
        "user_base_LLM.json": (1, 2, 3),
        "user_anchor_candidate.json": (4, 5),
        "test_100/user_test_100.json": (6, 7),
    }
    for name, users in files.items():
        (tmp_path / "data" / name).write_text(json.dumps([user(u) for u in users]))
    own = {
        "data.source": "per-pcs",
        "data.task": "lamp-2m",
        "data.path": str(tmp_path / "data"),
        "roles.order": "given",
        "adaptation.examples": "queries",
    }
    return lambda changes=None: small_config({**SIX, **own, **(changes or {})})


def test_a_published_folder_gives_the_roles(published):
    roles = results_of(federation(published()))["roles"]
    assert set(roles["base"]) < {"1", "2", "3"}
    assert roles["candidates"] == ["4", "5"]
    assert roles["targets"] == ["6", "7"]


def test_more_may_be_wanted_of_a_given_role_than_there_are(published):
    changes = {"roles.base": 1000, "roles.candidates": 1000, "roles.targets": 1000}
    roles = results_of(federation(published(changes)))["roles"]
    assert roles == {"base": ["1", "2", "3"], "candidates": ["4", "5"], "targets": ["6", "7"]}


def test_a_data_set_that_gives_one_base_user_cannot_be_adapted_to(published, tmp_path):
    values = published()
    path = tmp_path / "data" / "user_base_LLM.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:1]))
    with pytest.raises(PerPcsError, match="at least 2 base users, but there are 1"):
        federation(values)


def test_more_sharers_than_given_candidates_are_told_before_anything_slow(published):
    values = published({"roles.candidates": 1000, "sharers.count": 3})
    with pytest.raises(ConfigError, match=r"sharers\.count = 3, but there are 2 candidates"):
        federation(values)
    assert not (Path(str(values["run.dir"])) / "adaptation").exists()


def test_shares_of_the_users_run(small_config):
    shares = {"roles.base": 0.3, "roles.candidates": 0.4, "roles.targets": 0.3}
    roles = results_of(federation(small_config(shares)))["roles"]
    assert [len(users) for users in roles.values()] == [3, 4, 3]


def test_a_table_runs(small_config, tmp_path):
    rows = [
        {"who": u, "said": f"film {i} of {u}", "tag": "comedy" if i % 2 else "action", "t": -i}
        for u in range(7)
        for i in range(5)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        "data.source": "table",
        "data.path": str(path),
        "data.task": "movie-tagging",
        "data.user-column": "who",
        "data.input-column": "said",
        "data.output-column": "tag",
        "data.time-column": "t",
        "data.queries": 2,
    }
    folder = federation(small_config({**SIX, **own}))
    answered = read_lines(folder / "predictions" / "base.jsonl")
    # Time runs backwards in the file, so its first rows are the queries.
    assert [row["gold"] for row in answered[:2]] == ["comedy", "action"]
    assert len(answered) == 4
