"""The source of Debian maintainers, on invented packages."""

import hashlib
import json

import pytest

from fl_perpcs.data import Source
from fl_perpcs.data.debian import DebianSynopses
from fl_perpcs.data.leaks import LeakChecked
from fl_perpcs.errors import PerPcsError


def item(name, text=None, output=None):
    return {
        "id": name,
        "input": text or f"Long text on {name}.",
        "output": output or f"about {name}",
    }


def user(user_id, count):
    return {"id": user_id, "items": [item(f"{user_id}-{i}") for i in range(count)]}


def write(folder, lines, sha256=None):
    data = "".join(
        (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)) + "\n"
        for line in lines
    ).encode()
    folder.mkdir(exist_ok=True)
    (folder / "users.jsonl").write_bytes(data)
    manifest = {"sha256": sha256 or hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_last_items_are_queries_and_small_users_are_left_out(tmp_path):
    folder = write(tmp_path, [user("b", 12), user("ä", 11), user("a", 13)])
    source: Source = DebianSynopses(folder, queries=2)
    assert source.user_ids() == ["a", "b"]
    b = source.user("b")
    assert b.id == "b"
    assert [e.id for e in b.history] == [f"b-{i}" for i in range(10)]
    assert [e.id for e in b.queries] == ["b-10", "b-11"]
    assert b.queries[0].input == "Long text on b-10."
    assert b.queries[0].output == "about b-10"
    assert source.user("a").id == "a"  # after two lines with characters of several bytes


def test_items_that_give_a_query_away_are_for_others_to_remove_but_do_not_count(tmp_path):
    items = [item(f"p{i}") for i in range(12)]
    items[3]["output"] = "About  P11"
    items[5]["input"] = "long text on P12."
    items += [item("p11"), item("p12")]
    items[11]["output"] = "something else"
    items[11]["input"] = "Something else."
    source = DebianSynopses(write(tmp_path, [{"id": "u", "items": items}]), queries=2)
    assert [e.id for e in source.user("u").history] == [f"p{i}" for i in range(12)]
    u = LeakChecked(source, "remove").user("u")
    assert [e.id for e in u.queries] == ["p11", "p12"]
    assert [e.id for e in u.history] == [f"p{i}" for i in range(12) if i not in (3, 5)]
    items[0]["output"] = "about p12"  # nine history items are left
    source = DebianSynopses(write(tmp_path, [{"id": "u", "items": items}]), queries=2)
    assert source.user_ids() == []


def test_default_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PERPCS_HOME", str(tmp_path))
    with pytest.raises(PerPcsError, match=r"manifest\.json is not there.*perpcs fetch"):
        DebianSynopses(None, queries=1)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "debian-synopsis", [user("a", 11)])
    assert DebianSynopses(None, queries=1).user_ids() == ["a"]


def test_unknown_user(tmp_path):
    source = DebianSynopses(write(tmp_path, [user("a", 12)]), queries=2)
    with pytest.raises(PerPcsError, match=r"no user 'b' with at least 12 items.*'a'"):
        source.user("b")


def test_queries_below_one(tmp_path):
    with pytest.raises(PerPcsError, match=r"data\.queries = 0"):
        DebianSynopses(write(tmp_path, [user("a", 12)]), queries=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("", "line 2: not JSON"),
        ([], "line 2: field 'id' is nothing; expected a str"),
        ({"id": 3, "items": []}, "line 2: field 'id' is int"),
        ({"id": "b"}, "line 2: field 'items' is nothing; expected a list"),
        ({"id": "b", "items": [item("p"), 7]}, "line 2, item 2: field 'id'"),
        ({"id": "b", "items": [{"id": "p", "input": "x"}]}, "line 2, item 1: field 'output'"),
        (user("a", 3), "line 2: second 'a'"),
    ],
)
def test_malformed_lines_are_named(tmp_path, line, message):
    with pytest.raises(PerPcsError) as caught:
        DebianSynopses(write(tmp_path, [user("a", 12), line]), queries=1)
    assert message in str(caught.value)
    assert "users.jsonl" in str(caught.value)
    assert "perpcs fetch debian-synopsis" in str(caught.value)


def test_checksum(tmp_path):
    with pytest.raises(PerPcsError, match=r"manifest\.json expects 00"):
        DebianSynopses(write(tmp_path, [user("a", 12)], sha256="00"), queries=1)


@pytest.mark.parametrize("text", ["", "[]", "{}", "3"])
def test_malformed_manifest(tmp_path, text):
    write(tmp_path, [user("a", 12)])
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(PerPcsError, match=r"manifest\.json has no field 'sha256'"):
        DebianSynopses(tmp_path, queries=1)


def test_missing_users(tmp_path):
    write(tmp_path, [user("a", 12)])
    (tmp_path / "users.jsonl").unlink()
    with pytest.raises(PerPcsError, match=r"users\.jsonl is not there"):
        DebianSynopses(tmp_path, queries=1)
