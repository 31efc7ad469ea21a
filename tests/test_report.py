import html
import json
import os
import random
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from fl_perpcs.config import Config
from fl_perpcs.errors import PerPcsError
from fl_perpcs.ledger import Entry, Ledger
from fl_perpcs.report import write_report
from fl_perpcs.report.facts import (
    Phase,
    by_group,
    choices,
    gains,
    layer_of,
    phases,
    scores,
    traffic,
)
from fl_perpcs.report.page import number, size, span
from fl_perpcs.report.plots import short

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
METHODS = ("base", "assembled", "oppu")


def fake_run(
    folder: Path,
    *,
    targets: int = 8,
    sharers: int = 12,
    layers: int = 4,
    communities: int = 4,
    methods: tuple[str, ...] = METHODS,
    generate: bool = True,
    metric: str = "accuracy",
    first_target: str = "user-0000",
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a run folder with made-up numbers of a believable shape."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    ids = [f"user-{n:04d}" for n in range(targets + 2 * sharers + 12)]
    ids[0] = first_target
    roles = {
        "targets": ids[:targets],
        "candidates": ids[targets : targets + 2 * sharers],
        "base": ids[-12:],
    }
    sharing = sorted(rng.sample(roles["candidates"], sharers))
    groups = {
        user: f"community-{n % communities}" if communities else "" for n, user in enumerate(ids)
    }
    sites = [f"model.layers.{n}.self_attn.{m}" for n in range(layers) for m in MODULES]

    pull = {"base": 0.0, "assembled": 0.6, "oppu": 1.0}
    rows: list[dict[str, Any]] = []
    table = []
    for method in methods:
        own: dict[str, dict[str, float]] = {}
        for user in roles["targets"]:
            person = random.Random(f"{user} of the run")
            base, room = person.gauss(1.4, 0.2), person.uniform(0.1, 0.5)
            loss = base - room * pull.get(method, 0.3) + rng.gauss(0, 0.04)
            row = {"phase": f"evaluate {method}", "user": user}
            row |= {"queries": 20, "tokens": 40, "loss": loss, "seconds": rng.uniform(1, 3)}
            row |= {"worker": 4321, "lm-loads": 1}
            rows.append(row)
            own[user] = {"loss": loss}
            if generate:
                hits = 12 + 8 * room * pull.get(method, 0.3) * 1.6 + rng.gauss(0, 1)
                own[user][metric] = min(20, round(hits)) / 20
        mean = {
            name: float(np.mean([values[name] for values in own.values()]))
            for name in ("loss", *([metric] if generate else []))
        }
        table.append(
            {
                "method": method,
                "users": targets,
                "queries": 20 * targets,
                "dropped": 0,
                "intervals": {name: [0.9 * m, 1.1 * m] for name, m in mean.items()},
                "loss": mean.pop("loss"),
                "metrics": mean,
                "by_user": own,
                "gain": pull.get(method) if "oppu" in methods else None,
            }
        )
    for user in sharing:
        rows.append({"phase": "share", "user": user, "losses": [1.0, 0.5], "steps": 60})

    recipes: dict[str, dict[str, dict[str, float]]] = {}
    fame = {sharer: rng.expovariate(1) for sharer in sharing}
    for target in roles["targets"]:
        recipes[target] = {}
        for depth, site in enumerate(sites):
            liking = {
                sharer: fame[sharer]
                + 1.5 * (groups[sharer] == groups[target]) * (1 + depth / len(sites))
                + rng.gauss(0, 0.6)
                for sharer in sharing
            }
            best = sorted(liking, key=lambda sharer: -liking[sharer])[:3]
            weights = np.exp([liking[sharer] for sharer in best])
            recipes[target][site] = dict(zip(best, (weights / weights.sum()).tolist(), strict=True))
    clock = 1_700_000_000.0
    events = []
    for phase, total in (
        ("adapt", 12),
        ("share", sharers),
        ("assemble", targets),
        *((f"evaluate {m}", targets) for m in methods),
    ):
        for done in range(1, total + 1):
            events.append(
                {"time": clock, "event": "phase", "phase": phase, "done": done, "total": total}
            )
            clock += 2.5
    events.append({"time": clock, "event": "run", "status": "completed"})

    results = {
        "task": "movie-tagging",
        "title": "movie tagging, synthetic users",
        "answers": "generate" if generate else "none",
        "methods": table,
        "main_metric": metric if generate else "loss",
        "roles": roles,
        "sharers": sharing,
        "groups": groups,
        "pool": {
            "sharers": sharers,
            "pieces": sharers * len(sites),
            "bytes": 1_234_567,
            "sites": sites,
        },
    }
    versions = {
        "seed": 0,
        "source": "1f" * 32,
        "python": "3.11.2",
        "machine": "x86_64, 2 CPUs",
        "started": "2026-03-01T10:20:30+0000",
        "torch": "2.9.0",
        "flwr": "1.42.0",
    }
    settings = Config.model_validate(config or {"assembly": {"top-k": 5}})
    (folder / "config.toml").write_text(tomli_w.dumps(settings.model_dump(by_alias=True)))
    for name, value in (("results", results), ("versions", versions), ("recipes", recipes)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    for name, lines in (("events", events), ("metrics", rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def change(folder: Path, **values: Any) -> None:
    """Replace keys of a run's results."""
    path = folder / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def page_of(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


class Checker(HTMLParser):
    """Collects a page's elements, attributes and unclosed tags."""

    VOID = frozenset({"meta", "br", "path", "image", "use", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    return checker


def test_page_holds_the_numbers_and_every_section(tmp_path: Path) -> None:
    folder = fake_run(tmp_path)
    assert write_report(folder) == folder / "report.html"
    page = page_of(folder)
    results = json.loads((folder / "results.json").read_text())
    for row in results["methods"]:
        assert f">{row['loss']:.3f}<" in page
        assert f">{row['metrics']['accuracy']:.3f}\n" in page
        for low, high in row["intervals"].values():
            assert f"<small>[{low:.3f}, {high:.3f}]</small>" in page
        assert f">{row['gain'] * 100:.0f}\N{NO-BREAK SPACE}%<" in page
    for title in (
        "Results",
        "Gains over the base LLM",
        "Who picked whose pieces",
        "Popular sharers",
        "Users",
        "Pool",
        "Costs per target",
        "Phases",
        "Config",
        "Versions",
    ):
        assert f"<h2>{title}</h2>" in page
    for text in (
        "2026-03-01 10:20",
        "movie tagging, synthetic users · answers generated",
        "loss per<br>response token ↓",
        '<th class="n">accuracy</th>',
        "x86_64, 2 CPUs",
        "completed",
        "1.2 MB",
        "layer 3",
        "12 base users",
        "24 candidates",
        "8 targets",
    ):
        assert text in page
    assert page.count("<svg") == 4
    assert ">lm-loads<" not in page  # what is no time and no size is no cost
    checked(page)


def test_config_marks_what_differs_from_the_defaults(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path))
    marked = re.findall(r'<tr class="changed"><td><code>([^<]*)</code>', page)
    assert marked == ["assembly.top-k"]
    assert f"All {len(Config().flat())} keys, 1 of them" in page


@pytest.mark.parametrize(
    "evil",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "]]></text><script>",
        "<!--",
        "{{ 7 * 7 }}",
        "$\\frac{$",
        "_hidden",
        "#0a0b01",
        "用户\n二",
        "",
    ],
)
def test_foreign_ids_stay_text(tmp_path: Path, evil: str) -> None:
    folder = fake_run(tmp_path, first_target=evil, layers=2)
    results = json.loads((folder / "results.json").read_text())
    groups = results["groups"] | dict.fromkeys(results["sharers"][:2], evil)
    change(folder, groups=groups | {evil: evil})
    checker = checked(page_of(folder))
    assert not {"script", "img"} & set(checker.tags)
    assert html.escape(evil.replace("\n", " "), quote=False)[:8] in page_of(folder)


def test_page_loads_nothing(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path))
    assert "http://" not in page and "https://" not in page and "@import" not in page
    checker = checked(page)
    assert not {"script", "link", "iframe"} & set(checker.tags)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in checker.links)
    assert not re.search(r"url\((?!#)", page)
    # Every colour comes from the page, for light and for dark.
    assert "#0a0b" not in page


def test_same_folder_same_bytes(tmp_path: Path) -> None:
    one, two = fake_run(tmp_path / "one"), fake_run(tmp_path / "two")
    first = write_report(one).read_bytes()
    assert write_report(one).read_bytes() == first
    assert write_report(two).read_bytes() == first
    command = [
        sys.executable,
        "-c",
        "import sys, pathlib, fl_perpcs.report as r;r.write_report(pathlib.Path(sys.argv[1]))",
        str(two),
    ]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert (two / "report.html").read_bytes() == first


@pytest.mark.parametrize(
    ("methods", "gains_shown"),
    [
        (("base",), False),
        (("assembled",), False),
        (("base", "assembled"), True),
        (("base", "oppu"), True),
        (("base", "retrieval", "pool-mean", "assembled", "oppu"), True),
    ],
)
def test_any_methods(tmp_path: Path, methods: tuple[str, ...], gains_shown: bool) -> None:
    page = page_of(fake_run(tmp_path, methods=methods))
    assert ("<h2>Gains over the base LLM</h2>" in page) == gains_shown
    assert ("retrieval" in page) == ("retrieval" in methods)
    checked(page)


def test_without_metrics_the_loss_is_the_measure(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path, generate=False, communities=0))
    assert "fall of the loss" in page
    assert "rise of" not in page and "accuracy" not in page
    assert "loss only, no answers" in page
    assert "own group" not in page


def test_of_an_error_less_is_better(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, metric="mae")
    page = page_of(folder)
    assert "fall of mae" in page and "rise of" not in page
    assert '<th class="n">mae ↓</th>' in page
    assert "gain in mae" in page


def test_dropped_queries_are_shown_if_there_are_any(tmp_path: Path) -> None:
    folder = fake_run(tmp_path)
    assert "dropped" not in page_of(folder)
    table = json.loads((folder / "results.json").read_text())["methods"]
    change(folder, methods=[row | {"dropped": 3} for row in table])
    assert page_of(folder).count('<td class="n">3</td>') == len(table)


def test_results_without_intervals_or_users_make_a_page(tmp_path: Path) -> None:
    folder = fake_run(tmp_path)
    table = json.loads((folder / "results.json").read_text())["methods"]
    older = ("method", "users", "queries", "loss", "metrics", "gain")
    change(folder, methods=[{key: row[key] for key in older} for row in table])
    page = page_of(folder)
    assert "bootstrap" not in page and "Gains over" not in page
    checked(page)


@pytest.mark.parametrize(
    "missing", ["recipes.json", "events.jsonl", "metrics.jsonl", "versions.json"]
)
def test_missing_parts_are_left_out(tmp_path: Path, missing: str) -> None:
    folder = fake_run(tmp_path)
    (folder / missing).unlink()
    page = page_of(folder)
    assert ("Who picked whose pieces" in page) == (missing != "recipes.json")
    assert ("<h2>Phases</h2>" in page) == (missing != "events.jsonl")
    assert ("Costs per target" in page) == (missing != "metrics.jsonl")
    assert ("<h2>Versions</h2>" in page) == (missing != "versions.json")


def test_bare_results_are_enough(tmp_path: Path) -> None:
    folder = fake_run(tmp_path)
    for name in ("recipes.json", "events.jsonl", "metrics.jsonl", "versions.json"):
        (folder / name).unlink()
    (folder / "results.json").write_text("{}")
    checked(page_of(folder))


def test_pool_folder_tells_what_the_results_do_not(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, sharers=3)
    results = json.loads((folder / "results.json").read_text())
    manifest = {
        "sites": {site: [8, 8] for site in results["pool"]["sites"]},
        "sharers": [{"sharer": sharer} for sharer in [*results["sharers"], "never picked"]],
    }
    change(folder, pool=None, sharers=None)
    (folder / "pool").mkdir()
    (folder / "pool" / "manifest.json").write_text(json.dumps(manifest))
    page = page_of(folder)
    assert "4 sharers" in page and "at 16 sites" in page
    assert "never picked" in page


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(PerPcsError, match="not a run folder"):
        write_report(tmp_path)
    folder = fake_run(tmp_path / "run")
    (folder / "results.json").write_text("{")
    with pytest.raises(PerPcsError, match=r"results\.json is damaged"):
        write_report(folder)
    (folder / "results.json").unlink()
    with pytest.raises(PerPcsError, match="did not finish"):
        write_report(folder)


def test_the_page_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_run(tmp_path)
    before = write_report(folder).read_bytes()
    change(folder, main_metric="loss")

    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            write_report(folder)
    assert (folder / "report.html").read_bytes() == before
    assert write_report(folder).read_bytes() != before


def test_large_run_is_fast(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, targets=60, sharers=50, layers=30, communities=6)
    start = time.monotonic()
    page = page_of(folder)
    assert time.monotonic() - start < 30
    assert len(page) < 2_000_000
    assert "layer 29" in page


def test_importing_the_package_imports_no_matplotlib() -> None:
    code = "import sys, fl_perpcs.report; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_layer_of() -> None:
    assert layer_of("model.layers.12.self_attn.q_proj") == 12
    assert layer_of("h.3.attn.4.c_attn") == 3
    assert layer_of("lm_head") == 0


def test_choices_average_over_sites() -> None:
    recipes = {
        "t": {
            "layers.0.q": {"a": 1.0},
            "layers.0.v": {"a": 0.5, "b": 0.5},
            "layers.1.q": {"c": 1.0},
            "layers.1.v": {},
        }
    }
    found = choices(recipes, ["b", "a"], ["t", "no recipe"], {"t": "x", "c": "x", "a": "y"})
    assert found is not None
    assert (found.targets, found.sharers, found.layers) == (["t"], ["b", "a", "c"], [0, 1])
    np.testing.assert_allclose(found.weights[:, 0], [[0.25, 0.75, 0], [0, 0, 1]])
    np.testing.assert_allclose(found.overall[0], [0.5 / 3, 0.5, 1 / 3])
    np.testing.assert_allclose(found.first[0], [0.5, 1.5, 1])
    assert found.same_group.tolist() == [[False, False, True]]
    grouped = by_group(found)
    assert grouped.sharers == ["c", "a", "b"]
    np.testing.assert_allclose(grouped.overall[0], [1 / 3, 0.5, 0.5 / 3])
    assert choices({"t": {"layers.0.q": {}}}, ["a"], ["t"], {}) is None


def test_gains_are_positive_where_a_user_is_better_off() -> None:
    table = [
        {
            "method": "base",
            "by_user": {"u": {"loss": 2.0, "accuracy": 0.25, "mae": 1.0}, "v": {"loss": 1.0}},
        },
        {
            "method": "pool-mean",
            "by_user": {"u": {"loss": 1.5, "accuracy": 0.75, "mae": 0.75}, "v": {"loss": None}},
        },
        {"method": "empty"},
    ]
    found = scores({"methods": table})
    assert set(found) == {"base", "pool-mean", "empty"}
    assert gains(found, "pool-mean", "loss") == {"u": 0.5}
    assert gains(found, "pool-mean", "accuracy") == {"u": 0.5}
    assert gains(found, "pool-mean", "mae") == {"u": 0.25}
    assert gains(found, "empty", "loss") == {}


def test_traffic_is_told_by_phase_in_the_order_of_the_ledger(tmp_path: Path) -> None:
    entries = [
        Entry("share", "a", "train.share", "down", 1, 2, 0, 2_000),
        Entry("share", "a", "train.share", "up", 1, 2, 300, 5_000),
        Entry("share", "b", "train.share", "down", 1, 2, 0, 1_000),
        Entry("evaluate base", "c", "evaluate.base", "up", 0, 0, 70, 100),
    ]
    assert traffic(entries) == [("share", 2, 3_000, 5_000, 300), ("evaluate base", 1, 0, 100, 70)]
    folder = fake_run(tmp_path)
    assert "Communication" not in page_of(folder)
    Ledger(entries).save(folder)
    assert "Communication" in page_of(folder)


def test_who_was_not_let_into_the_pool_is_named(tmp_path: Path) -> None:
    folder = fake_run(tmp_path)
    assert "Not let in" not in page_of(folder)
    (folder / "refused.json").write_text(json.dumps({"<b>x": "the norm of its B is 1e3 x"}))
    page = page_of(folder)
    assert "Not let in" in page and "the norm of its B is 1e3 x" in page and "<b>x" not in page


def test_phases_last_from_the_line_before_to_their_last() -> None:
    def line(at: float, phase: str, done: int) -> dict[str, Any]:
        return {"time": at, "event": "phase", "phase": phase, "done": done, "total": 2}

    events = [
        {"time": 0.0, "event": "run", "status": "started"},
        line(3.0, "adapt", 1),
        line(5.0, "adapt", 2),
        line(7.0, "adapt", 1),
        line(8.0, "adapt", 2),
        line(10.0, "share", 0),
        line(14.0, "share", 2),
    ]
    assert phases(events) == [Phase("adapt", 8.0, 2), Phase("share", 4.0, 2)]


def test_numbers_as_text() -> None:
    assert [number(v) for v in (1234, 0.4375, 12345.6, None, float("nan"), True)] == [
        "1,234",
        "0.438",
        "12,346",
        "\N{EN DASH}",
        "\N{EN DASH}",
        "\N{EN DASH}",
    ]
    assert [size(v) for v in (12, 1_234_567)] == ["12 B", "1.2 MB"]
    assert [span(v) for v in (1.25, 75.2, 7260)] == ["1.2 s", "1 min 15 s", "2 h 1 min"]
    assert short("user-0001") == "user-0001"
    assert len(short("x" * 100)) == 22
