"""The typed run config: defaults, refusals and what cannot be combined."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_perpcs.config import Config, ConfigError, load_config, read_config_file

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("*.toml"))


def problems_of(values: dict) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config(values)
    return raised.value.problems


def test_the_defaults_of_the_flower_app_are_the_defaults_of_the_config():
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["tool"]["flwr"]["app"]["config"]
    flat = {}
    for section, value in declared.items():
        if isinstance(value, dict):
            flat |= {f"{section}.{key}": v for key, v in value.items()}
        else:
            flat[section] = value
    expected = Config().flat()
    assert flat == expected
    # 1 == 1.0 == True: Flower passes types on as declared.
    assert {k: type(v) for k, v in flat.items()} == {k: type(v) for k, v in expected.items()}


def test_the_defaults_can_be_run():
    assert load_config({}) == Config()


def test_a_config_comes_back_from_its_flat_form():
    config = load_config({"assembly.top-k": 5, "lm.name": "x", "seed": 7, "adapter.lr": 0.5})
    assert load_config(config.flat()) == config
    assert (config.assembly.top_k, config.lm.name, config.seed) == (5, "x", 7)
    assert config.adapter.lr == 0.5
    assert config.gates.lr == Config().gates.lr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_config_files_load(path):
    values = read_config_file(path)
    assert values
    config = load_config(values)
    assert {key: config.flat()[key] for key in values} == values


def test_there_are_config_files():
    assert "demo.toml" in [path.name for path in FILES]


def test_nested_and_dotted_files_are_read_alike(tmp_path):
    (tmp_path / "nested.toml").write_text("seed = 3\n[assembly]\ntop-k = 5\n")
    (tmp_path / "dotted.toml").write_text("seed = 3\nassembly.top-k = 5\n")
    expected = {"seed": 3, "assembly.top-k": 5}
    assert read_config_file(tmp_path / "nested.toml") == expected
    assert read_config_file(tmp_path / "dotted.toml") == expected


@pytest.mark.parametrize("content", [b"seed = ", b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml"):
        read_config_file(path)
    with pytest.raises(ConfigError, match="is not a TOML"):
        read_config_file(tmp_path)


def test_all_unknown_keys_and_bad_values_are_listed_at_once():
    problems = problems_of(
        {
            "assembly.topk": 3,
            "nonsense": 1,
            "lora.rank": 0,
            "adapter.lr": -1.0,
            "data.queries": "many",
            "assembly.selection": "best",
        }
    )
    assert len(problems) == 6
    for part in (
        "assembly.topk is not a key",
        "nonsense is not a key",
        "lora.rank = 0: ",
        "adapter.lr = -1.0: ",
        "data.queries = 'many': ",
        "assembly.selection = 'best': ",
    ):
        assert sum(problem.startswith(part) for problem in problems) == 1


def test_all_conflicts_and_unknown_keys_are_listed_at_once():
    problems = problems_of({"roles.base": 1, "sharers.count": 99, "run.dir": "here", "x": 1})
    assert len(problems) == 4


def test_the_message_holds_every_problem():
    with pytest.raises(ConfigError, match=r"2 problem\(s\)(.|\n)*lora\.rank(.|\n)*adapter\.lr"):
        load_config({"lora.rank": 0, "adapter.lr": -1.0})


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("assembly.topk", "assembly.top-k"),
        ("assembly.top_k", "assembly.top-k"),
        ("sharer.count", "sharers.count"),
        ("Seed", "seed"),
        ("lora.target-module", "lora.target-modules"),
    ],
)
def test_a_misspelt_key_gets_a_hint(typo, meant):
    assert problems_of({typo: 1}) == [
        f"{typo} is not a key of the run config; did you mean {meant}?"
    ]


def test_a_key_that_resembles_none_points_to_the_list():
    (problem,) = problems_of({"zzzzzz": 1})
    assert "docs/config.md" in problem


def test_a_section_is_not_a_key():
    (problem,) = problems_of({"assembly": 1})
    assert problem.startswith("assembly is not a key")


CONFLICTS = {
    "too few users": ({"data.users": 53}, "= 18 + 24 + 12 = 54 users, but there are 53"),
    "more communities than users": (
        {"data.users": 54, "data.communities": 55},
        "data.communities = 55 is more",
    ),
    "more sharers than candidates": ({"sharers.count": 25}, "sharers.count = 25 is more"),
    "one base user": ({"roles.base": 1}, "at least 2 base users"),
    "strategy is no path": ({"adaptation.strategy": "FedAvg"}, "is not an import path"),
    "nothing to load": ({"adaptation.mode": "load"}, "needs adaptation.adapter"),
    "relative run.dir": ({"run.dir": "runs/x"}, "run.dir = 'runs/x' is relative"),
    "relative data.path": ({"data.path": "data"}, "data.path = 'data' is relative"),
    "more shares than users": ({"roles.base": 0.9, "roles.candidates": 0.9}, "= 48 + 48 + 12"),
    "more sharers than the share": (
        {"roles.candidates": 0.2, "sharers.count": 11},
        "sharers.count = 11 is more than roles.candidates = 0.2 (10 users)",
    ),
    "given roles of synthetic users": (
        {"roles.order": "given"},
        "data.source = 'personas' gives no roles",
    ),
    "LaMP files of no task": ({"data.source": "lamp"}, "data.source = 'lamp' needs data.task"),
    "relative task": (
        {"data.source": "lamp", "data.task": "mine.toml"},
        "data.task = 'mine.toml' is relative",
    ),
    "table without a path": (
        {"data.source": "table", "data.task": "lamp-3"},
        "set exactly one of them",
    ),
    "table without users": (
        {
            "data.source": "table",
            "data.task": "lamp-3",
            "data.path": "/x.csv",
            "data.user-column": "",
        },
        "data.user-column is empty",
    ),
    "relative adapter": (
        {"adaptation.mode": "load", "adaptation.adapter": "a"},
        "adaptation.adapter = 'a' is relative",
    ),
    "relative pool": ({"sharers.pool": "pool"}, "sharers.pool = 'pool' is relative"),
    "unknown reference": ({"evaluation.references": "base,best"}, "references = 'base,best'"),
    "unknown selection": ({"sharers.selection": "best"}, "sharers.selection = 'best' is not known"),
    "unknown scorer": ({"assembly.scorer": "best"}, "use one of published, centred"),
    "unknown merge": ({"assembly.merge": "ties"}, "assembly.merge = 'ties' is not known"),
    "RAG without retrieval": ({"strategy.name": "rag"}, "'rag' needs prompts.retrieve"),
    "PAG without profiles": ({"strategy.name": "pag"}, "'pag' needs prompts.profiles"),
    "DoRA": ({"lora.variant": "dora"}, "the sum of two pieces is no piece of a sum"),
    "IA3": ({"lora.variant": "ia3"}, "it has no factors"),
    "no modules": ({"lora.target-modules": " "}, "lora.target-modules is empty"),
    "float16 on the CPU": ({"lm.dtype": "float16", "lm.device": "cpu"}, "float16"),
    "too few to sample from": (
        {"assembly.selection": "sample", "assembly.top-k": 11},
        "raise the second",
    ),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_what_cannot_be_combined_is_refused(case):
    values, message = CONFLICTS[case]
    (problem,) = problems_of(values)
    assert message in problem


@pytest.mark.parametrize(
    "values",
    [
        {"data.users": 54},
        {"data.source": "debian-synopsis", "data.users": 1, "data.communities": 9},
        {"sharers.count": 24},
        {"roles.base": 0.3, "roles.candidates": 0.4, "roles.targets": 0.3},
        {"roles.base": 0, "adaptation.mode": "none", "adaptation.strategy": "unused"},
        {"adaptation.mode": "load", "adaptation.adapter": "/somewhere"},
        {"lm.dtype": "float16", "lm.device": "cuda"},
        {"assembly.selection": "sample", "assembly.top-k": 10},
        {"assembly.selection": "top-k", "assembly.top-k": 11},
        {"evaluation.references": " oppu , base"},
        {"evaluation.references": ""},
        {"assembly.scorer": "my_package:scorer", "assembly.merge": "my_package:merge"},
        {"run.dir": "/somewhere", "data.path": "/elsewhere"},
    ],
)
def test_what_can_be_combined_is_not_refused(values):
    config = load_config(values)
    assert {key: config.flat()[key] for key in values} == values


def test_lists_are_split_at_commas():
    config = load_config(
        {"evaluation.references": " oppu , base", "lora.target-modules": "c_attn,"}
    )
    assert config.references == ["oppu", "base"]
    assert config.target_modules == ["c_attn"]


@given(st.text(min_size=1, max_size=20))
def test_a_run_name_that_could_leave_its_folder_is_refused(name):
    try:
        config = load_config({"run.name": name})
    except ConfigError as error:
        assert "run.name" in str(error)
    else:
        assert "/" not in config.run.name
        assert not config.run.name.startswith(".")
        assert config.run.name.isascii()
        assert config.run.name.isprintable()


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Config().seed = 1
