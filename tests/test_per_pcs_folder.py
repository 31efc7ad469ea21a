"""The folders that Per-Pcs was published with as users."""

import json

import pytest

from fl_perpcs.config import load_config
from fl_perpcs.data import Example, Source, open_source
from fl_perpcs.data.per_pcs_folder import FILES, PerPcsFolder
from fl_perpcs.errors import PerPcsError

ASK = {
    "lamp-1": (
        'For an author who has written the paper with the title "T "of" T", which reference is'
        ' related? Just answer with [1] or [2] without explanation. [1]: "A" [2]: "B"'
    ),
    "lamp-2m": (
        "Which tag does this movie relate to among the following tags? Just answer with the tag"
        " name without further explanation. tags: [sci-fi, comedy] description: A film."
    ),
    "lamp-2n": (
        "Which category does this article relate to among the following categories? Just answer"
        " with the category name without further explanation. categories: [crime] article: News."
    ),
    "lamp-3": (
        "What is the score of the following review on a scale of 1 to 5? just answer with 1, 2, 3,"
        " 4, or 5 without further explanation. review: Fine."
    ),
    "lamp-4": "Generate a headline for the following article: News: many.",
    "lamp-5": "Generate a title for the following abstract of a paper: We do.",
    "lamp-6": "Generate a subject for the following email: Come.",
    "lamp-7": "Paraphrase the following tweet without any explanation before or after it: I: here.",
}
ITEM = {
    "lamp-1": {"title": "T", "abstract": "A", "citation": "C"},
    "lamp-2m": {"tag": "comedy", "description": "D"},
    "lamp-2n": {"text": "X", "title": "T", "category": "crime"},
    "lamp-3": {"text": "X", "score": "4"},
    "lamp-4": {"text": "X", "title": "T"},
    "lamp-5": {"title": "T", "abstract": "A"},
    "lamp-6": {"text": "X", "title": "T"},
    "lamp-7": {"text": "X"},
}
EXPECTED = {
    "lamp-1": (("T", "C"), 'T "of" T\nReference: [1] - A [2] - B'),
    "lamp-2m": (("D", "comedy"), "A film."),
    "lamp-2n": (("X", "crime"), "News."),
    "lamp-3": (("X", "4"), "Fine."),
    "lamp-4": (("X", "T"), "News: many."),
    "lamp-5": (("A", "T"), "We do."),
    "lamp-6": (("X", "T"), "Come."),
    "lamp-7": (("", "X"), "I: here."),
}


def user(user_id, task="lamp-2m", items=2, queries=2):
    asked = [{"id": f"{user_id}-{i}", "input": ASK[task], "gold": f"g{i}"} for i in range(queries)]
    return {"user_id": user_id, "profile": [ITEM[task]] * items, "query": asked}


def write(folder, base=None, candidate=None, target=None):
    users = {
        "base": [user(1), user(2)] if base is None else base,
        "candidate": [user("3")] if candidate is None else candidate,
        "target": [user(44)] if target is None else target,
    }
    for role, name in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(users[role]))
    return folder


def opened(folder, task="lamp-2m", queries=0):
    return PerPcsFolder(folder, task, queries=queries)


def fails(message, folder, **users):
    with pytest.raises(PerPcsError, match=message) as caught:
        source = opened(write(folder, **users))
        for user_id in source.user_ids():
            source.user(user_id)
    return str(caught.value)


def test_roles_and_order(tmp_path):
    source: Source = opened(write(tmp_path))
    assert source.user_ids() == ["1", "2", "3", "44"]
    roles = {user_id: source.user(user_id).role for user_id in source.user_ids()}
    assert roles == {"1": "base", "2": "base", "3": "candidate", "44": "target"}
    assert source.task.name == "lamp-2m"


@pytest.mark.parametrize("task", list(ASK))
def test_each_task(tmp_path, task):
    source = opened(write(tmp_path, [], [], [user(7, task)]), task)
    found = source.user("7")
    pair, text = EXPECTED[task]
    assert found.history == (Example("0", *pair), Example("1", *pair))
    assert found.queries == (Example("7-0", text, "g0"), Example("7-1", text, "g1"))
    assert source.dropped("7") == 0


def test_item_ids_are_used_where_given(tmp_path):
    one = {"user_id": 1, "query": [], "profile": [{**ITEM["lamp-2m"], "id": 9}, ITEM["lamp-2m"]]}
    found = opened(write(tmp_path, base=[one])).user("1")
    assert [example.id for example in found.history] == ["9", "1"]
    assert found.queries == ()


def test_history_keeps_the_order_of_the_file(tmp_path):
    items = [{**ITEM["lamp-2m"], "id": i, "date": date} for i, date in ((1, "2016"), (2, "2015"))]
    found = opened(write(tmp_path, base=[{"user_id": 1, "query": [], "profile": items}])).user("1")
    assert [example.id for example in found.history] == ["1", "2"]


def test_last_queries_and_dropped(tmp_path):
    one = user(1, items=3, queries=4)
    one["query"][3]["gold"] = ""
    one["query"][2]["gold"] = 5.0
    one["profile"] = [*one["profile"], {"tag": " ", "description": "D"}]
    source = opened(write(tmp_path, base=[one]), queries=2)
    found = source.user("1")
    assert [(query.id, query.output) for query in found.queries] == [("1-1", "g1"), ("1-2", "5")]
    assert len(found.history) == 3
    assert source.dropped("1") == 2


def test_empty_profile_and_one_item(tmp_path):
    source = opened(write(tmp_path, base=[user(1, items=0), user(2, items=1)]))
    assert source.user("1").history == ()
    assert len(source.user("2").history) == 1


def test_profiles_path(tmp_path):
    source = opened(write(tmp_path))
    assert source.profiles_path is None
    (tmp_path / "profile-id2text.json").write_text("{}")
    assert source.profiles_path == tmp_path / "profile-id2text.json"


def test_open_source(tmp_path):
    write(tmp_path)
    keys = {"data.source": "per-pcs", "data.task": "lamp-2m", "data.path": str(tmp_path)}
    source = open_source(load_config(keys))
    assert source.user("3").role == "candidate"


# What is wrong


@pytest.mark.parametrize("role", list(FILES))
def test_missing_files(tmp_path, role):
    (write(tmp_path) / FILES[role]).unlink()
    with pytest.raises(
        PerPcsError, match=rf"{FILES[role]} is not there; expected the {role} users"
    ):
        opened(tmp_path)


def test_no_path_and_no_task(tmp_path):
    with pytest.raises(PerPcsError, match=r"data\.path is empty.*user_base_LLM\.json"):
        opened("")
    with pytest.raises(PerPcsError, match=r"data\.task is empty"):
        opened(tmp_path, task="")
    with pytest.raises(PerPcsError, match=r"has no \[lamp\] table"):
        opened(tmp_path, task="movie-tagging")


def test_overlapping_roles(tmp_path):
    message = fails(
        "user '2' is in user_base_LLM.json and in test_100", tmp_path, target=[user("2")]
    )
    assert "expected disjoint roles. Remove it from one of them" in message


def test_a_user_twice_in_a_file(tmp_path):
    fails(
        r"user_base_LLM\.json, record 2 \(user '1'\): the user comes twice",
        tmp_path,
        base=[user(1), user("1")],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user_id": None}, r"record 2: field 'user_id' is missing; expected text"),
        ({"user_id": [1]}, r"record 2: field 'user_id' is \[1\]"),
        (
            {"profile": None},
            r"record 2 \(user '2'\): field 'profile' is missing; expected an array",
        ),
        ({"profile": [3]}, r"record 2 \(user '2'\), profile item 1: field 'id' is missing"),
        (
            {"profile": [{"tag": "comedy"}]},
            r"record 2 \(user '2'\), profile item '0': field 'description' is missing",
        ),
        ({"query": {}}, r"record 2 \(user '2'\): field 'query' is of type dict; expected an array"),
        ({"query": [{}]}, r"record 2 \(user '2'\), query 1: field 'id' is missing"),
        ({"query": [{"id": 5}]}, r"query 1 \(id '5'\): field 'input' is missing; expected text"),
        (
            {"query": [{"id": 5, "input": ASK["lamp-2m"]}]},
            r"query 1 \(id '5'\): field 'gold' is missing; expected text",
        ),
        (
            {"query": [{"id": 5, "input": "What?", "gold": "g"}]},
            r"query 1 \(id '5'\): the input begins 'What\?'; expected the wording of lamp-2m",
        ),
    ],
)
def test_malformed_users(tmp_path, change, message):
    assert "user_base_LLM.json" in fails(message, tmp_path, base=[user(1), {**user(2), **change}])


def test_malformed_json(tmp_path):
    write(tmp_path)
    (tmp_path / FILES["candidate"]).write_text('[{"user_id": 3, ')
    with pytest.raises(PerPcsError, match=r"user_anchor_candidate\.json, record 1, byte \d+"):
        opened(tmp_path)


def test_unknown_user(tmp_path):
    with pytest.raises(PerPcsError, match=r"no user '5' in .*expected one of 4 ids such as '1'"):
        opened(write(tmp_path)).user("5")
