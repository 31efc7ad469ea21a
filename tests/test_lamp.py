"""LaMP's own files as users; expected values are written out by hand."""

import json
from pathlib import Path

import pytest

from fl_perpcs.config import load_config
from fl_perpcs.data import Example, Source, open_source
from fl_perpcs.data.lamp import Lamp, default_folder
from fl_perpcs.errors import PerPcsError
from fl_perpcs.tasks import load_task

FIXTURES = Path(__file__).parent / "lamp"
TASKS = ("lamp-1", "lamp-2m", "lamp-2n", "lamp-3", "lamp-4", "lamp-5", "lamp-6", "lamp-7")
MOVIE = (
    "Which tag does this movie relate to among the following tags? Just answer with the tag name"
    " without further explanation. tags: [sci-fi, comedy] description: "
)
PAPER = (
    'For an author who has written the paper with the title "{}", which reference is related?'
    ' Just answer with [1] or [2] without explanation. [1]: "{}" [2]: "{}"'
)

FIRST_ITEM = {
    "lamp-1": ("", 'A "Small" World of Graphs'),
    "lamp-2m": ("A crew wakes up on a ship that has lost its way.", "sci-fi"),
    "lamp-2n": ("The team won in the last minute.", "sports"),
    "lamp-3": ("Broke after a day.", "1"),
    "lamp-4": ("The river froze for the first time in a century.", "River Stands Still"),
    "lamp-5": ("We sort faster.", "Towards Faster Sorting"),
    "lamp-6": ("Can we meet at three?", "Meeting"),
    "lamp-7": ("", "so tired today lol"),
}
FIRST_QUERY = {
    "lamp-1": (
        'On "Hubs" in Graphs\nReference: [1] - Popular Vertices [2] - Baking Bread at Altitude',
        "[1]",
    ),
    "lamp-2m": ("An engineer builds a door to last week.", "sci-fi"),
    "lamp-2n": ("A sprinter from a town of ninety runs a record.", "sports"),
    "lamp-3": ("Came late but works.", "3"),
    "lamp-4": ("A bridge opens where the ferry was.", "Hello, Bridge"),
    "lamp-5": ("We search faster.", "Towards Faster Search"),
    "lamp-6": ("Lunch is at one.", "Lunch"),
    "lamp-7": ("I am hungry at present.", "sooo hungry lol"),
}
UNUSUAL_QUERY = {
    "lamp-1": ("q-50", "Rope Bridges\nReference: [1] - Knots and Loads [2] - Tax Law of Ports"),
    "lamp-2m": ("q-40", "Two gangs [and a dog] fight over one street: nobody wins."),
    "lamp-2n": ("q-20", "Parliament sits all night: nobody leaves."),
    "lamp-3": ("q-60", "Nie wieder"),
    "lamp-4": (
        "q-30",
        "A choir of beekeepers tours the coast: all concerts are sold out.",
    ),
    "lamp-5": ("q-40", "Products are noted: most converge."),
    "lamp-6": ("q-50", "La porte est fermée."),
    "lamp-7": ("q-30", "Good morning to everybody: have a pleasant day."),
}


def write(folder, questions, golds, split="train"):
    folder.mkdir(exist_ok=True)
    text = questions if isinstance(questions, str) else json.dumps(questions, ensure_ascii=False)
    (folder / f"{split}_questions.json").write_text(text, encoding="utf-8")
    table = {"task": "LaMP", "golds": [{"id": i, "output": o} for i, o in golds.items()]}
    (folder / f"{split}_outputs.json").write_text(json.dumps(table))
    return folder


def movie(question_id, profile, text="A film.", **more):
    return {"id": question_id, "input": MOVIE + text, "profile": profile, **more}


def item(item_id, tag="comedy", text=None, **more):
    return {"id": item_id, "tag": tag, "description": text or f"Film {item_id}.", **more}


def open_movies(folder, questions, golds=None, queries=0):
    golds = {q["id"]: "comedy" for q in questions} if golds is None else golds
    return Lamp(write(folder, questions, golds), "lamp-2m", split="train", queries=queries)


def only_user(source):
    (user_id,) = source.user_ids()
    return source.user(user_id)


def ids(examples):
    return [example.id for example in examples]


# Every task


@pytest.mark.parametrize("task", TASKS)
def test_first_user_of_each_task(task):
    source: Source = Lamp(FIXTURES / task, task, split="train", queries=0)
    assert len(source.user_ids()) == 6
    assert source.user_ids()[0] == "q-0"
    user = source.user("q-0")
    assert user.id == "q-0"
    assert ids(user.history) == ["100", "101", "102"]
    assert user.history[0] == Example("100", *FIRST_ITEM[task])
    assert ids(user.queries) == ["0", "10"]
    assert user.queries[0] == Example("0", *FIRST_QUERY[task])


@pytest.mark.parametrize("task", TASKS)
def test_colons_brackets_and_accents_in_queries(task):
    user_id, text = UNUSUAL_QUERY[task]
    user = Lamp(FIXTURES / task, task, split="train", queries=0).user(user_id)
    assert [query.input for query in user.queries] == [text]


@pytest.mark.parametrize("task", TASKS)
def test_every_user_of_the_fixtures(task):
    source = Lamp(FIXTURES / task, task, split="train", queries=0)
    for user_id in source.user_ids():
        user = source.user(user_id)
        assert len(user.history) == 3
        assert all(query.input for query in user.queries)
        assert source.dropped(user_id) == 0
        if labels := load_task(task).labels:
            assert {query.output for query in user.queries} <= set(labels)


def test_open_source(tmp_path):
    keys = {"data.source": "lamp", "data.task": "lamp-4", "data.path": str(FIXTURES / "lamp-4")}
    source = open_source(load_config(keys))
    assert source.task.name == "lamp-4"
    assert len(source.user_ids()) == 6


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PERPCS_HOME", str(tmp_path))
    assert default_folder("lamp-3") == tmp_path / "data" / "lamp" / "lamp-3"
    assert default_folder("lamp-3", "time") == tmp_path / "data" / "lamp" / "lamp-3-time"
    with pytest.raises(PerPcsError, match=r"Run: perpcs fetch lamp --task lamp-3 --split dev"):
        Lamp("", "lamp-3", split="dev", queries=0)
    with pytest.raises(PerPcsError, match=r"not public: build them yourself"):
        Lamp(None, "lamp-6", split="dev", queries=0)
    default_folder("lamp-2m").parent.mkdir(parents=True)
    write(default_folder("lamp-2m"), [movie("1", [item("a")])], {"1": "comedy"})
    assert Lamp("", "lamp-2m", split="train", queries=0).user_ids() == ["q-1"]


# Wording


@pytest.mark.parametrize(
    ("title", "first", "second"),
    [
        ('"Quoted" at the start', 'and "in" the middle', 'at the "end"'),
        ('On "which reference is related?"', "[2]: no", "[1]: yes"),
        ("数据 and données", "Zwei", "три"),
    ],
)
def test_titles_with_quotes_and_markers(tmp_path, title, first, second):
    questions = [{"id": "1", "input": PAPER.format(title, first, second), "profile": []}]
    source = Lamp(write(tmp_path, questions, {"1": "[2]"}), "lamp-1", split="train", queries=0)
    (query,) = only_user(source).queries
    assert query.input == f"{title}\nReference: [1] - {first} [2] - {second}"
    assert query.output == "[2]"


def test_odd_spacing(tmp_path):
    question = movie(7, [item(3, text="  A\n film. ", tag=" comedy\n")], text="  B \n\n film.\n ")
    question["input"] = question["input"].replace("] description: ", "]\n description:")
    user = only_user(open_movies(tmp_path, [question], {7: " sci-fi "}))
    assert user.queries == (Example("7", "B \n\n film.", "sci-fi"),)
    assert user.history == (Example("3", "A\n film.", "comedy"),)


def test_citations_where_items_have_them(tmp_path):
    profile = [{"id": "1", "title": "T", "citation": "C", "abstract": "A"}]
    questions = [{"id": "1", "input": PAPER.format("T", "C", "D"), "profile": profile}]
    source = Lamp(write(tmp_path, questions, {"1": "[1]"}), "lamp-1", split="train", queries=0)
    assert only_user(source).history == (Example("1", "T", "C"),)


def test_scores_may_be_numbers(tmp_path):
    scores = [5, 5.0, "4", 2.5]
    profile = [{"id": i, "text": "t", "score": score} for i, score in enumerate(scores)]
    text = (
        "What is the score of the following review on a scale of 1 to 5? just answer with 1, 2, 3,"
        " 4, or 5 without further explanation. review: r"
    )
    questions = [{"id": 1, "input": text, "profile": profile}]
    source = Lamp(write(tmp_path, questions, {1: 3.0}), "lamp-3", split="train", queries=0)
    user = only_user(source)
    assert [example.output for example in user.history] == ["5", "5", "4", "2.5"]
    assert user.queries == (Example("1", "r", "3"),)


def test_title_only_items_train_as_text(tmp_path):
    profile = [
        {"id": "1", "title": "T", "abstract": "A"},
        {"id": "2", "title": "T2"},
        {"id": "3", "title": "T3", "abstract": None},
        {"id": "4", "title": "T4", "abstract": " "},
    ]
    text = "Generate a title for the following abstract of a paper: q"
    folder = write(tmp_path, [{"id": "1", "input": text, "profile": profile}], {"1": "g"})
    source = Lamp(folder, "lamp-5", split="train", queries=0)
    user = only_user(source)
    assert [(e.input, e.output) for e in user.history] == [
        ("A", "T"),
        ("", "T2"),
        ("", "T3"),
        ("", "T4"),
    ]
    assert source.dropped("q-1") == 0


def test_values_may_look_like_templates(tmp_path):
    user = only_user(open_movies(tmp_path, [movie("1", [item("a", text="{tag} {x}", tag="{y}")])]))
    assert user.history == (Example("a", "{tag} {x}", "{y}"),)


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    text = json.dumps([movie("1", [item("a", text="cut \ud83d"), item("b", text="ok 😀")])])
    folder = write(tmp_path, text, {"1": "comedy"})
    user = only_user(Lamp(folder, "lamp-2m", split="train", queries=0))
    assert [example.input for example in user.history] == ["cut \ufffd", "ok 😀"]


# Users and histories


def test_one_profile_one_user(tmp_path):
    profile = [item("a"), item("b")]
    questions = [movie("1", profile), movie("2", [item("c")]), movie("3", profile[::-1])]
    source = open_movies(tmp_path, questions)
    assert source.user_ids() == ["q-1", "q-2"]
    assert ids(source.user("q-1").queries) == ["1", "3"]
    assert ids(source.user("q-1").history) == ["a", "b"]
    assert ids(source.user("q-2").history) == ["c"]  # a profile of one item


def test_user_ids_win_over_profiles(tmp_path):
    questions = [
        movie("1", [item("a")], user_id=7),
        movie("2", [item("a")], user_id="x/../y"),
        movie("3", [item("b")], user_id="7"),
    ]
    source = open_movies(tmp_path, questions)
    assert source.user_ids() == ["7", "x/../y"]
    assert ids(source.user("7").history) == ["a", "b"]
    assert ids(source.user("x/../y").queries) == ["2"]


def test_empty_profiles_make_no_common_user(tmp_path):
    source = open_movies(tmp_path, [movie("1", []), movie("2", [])])
    assert source.user_ids() == ["q-1", "q-2"]
    assert source.user("q-2").history == ()
    assert ids(source.user("q-2").queries) == ["2"]


def test_last_queries(tmp_path):
    questions = [movie(str(i), [item("a")]) for i in range(5)]
    assert ids(only_user(open_movies(tmp_path, questions, queries=2)).queries) == ["3", "4"]
    assert len(only_user(open_movies(tmp_path, questions, queries=9)).queries) == 5


def test_growing_profiles_are_united_in_time_order(tmp_path):
    old, new, newest = (
        item("a", date="2014-12-31"),
        item("b", date="2015-01-02"),
        item("c", date="2015-01-02"),
    )
    year = item("d", date=2015)
    questions = [
        movie("1", [old, year], user_id="u"),
        movie("2", [new, old, year], user_id="u"),
        movie("3", [new, newest, old, year], user_id="u"),
    ]
    user = only_user(open_movies(tmp_path, questions))
    assert ids(user.history) == ["a", "d", "b", "c"]
    assert ids(user.queries) == ["1", "2", "3"]


def test_order_of_the_file_where_a_date_is_missing(tmp_path):
    profile = [item("a", date="2015"), item("b"), item("c", date="2014")]
    assert ids(only_user(open_movies(tmp_path, [movie("1", profile)])).history) == ["a", "b", "c"]


def test_duplicate_ids(tmp_path):
    profile = [item("a"), item("b"), item("a"), item("a", tag="sci-fi"), item("a", text="Other.")]
    user = only_user(open_movies(tmp_path, [movie("1", profile)]))
    assert [(e.id, e.input, e.output) for e in user.history] == [
        ("a", "Film a.", "comedy"),
        ("a~2", "Film a.", "sci-fi"),
        ("a~3", "Other.", "comedy"),
        ("b", "Film b.", "comedy"),
    ]


def test_what_has_no_output_is_dropped_and_counted(tmp_path):
    profile = [item("a", tag=" "), item("b", tag=None), item("c"), item("d", text=" ")]
    questions = [movie("1", profile), movie("2", profile)]
    source = open_movies(tmp_path, questions, {"1": "", "2": "comedy"})
    user = source.user("q-1")
    assert ids(user.history) == ["c"]  # d has no input, and this task has no plain texts
    assert ids(user.queries) == ["2"]
    assert source.dropped("q-1") == 4


# What is wrong


def fails(folder, questions, message, golds=None, task="lamp-2m", split="train"):
    golds = {q["id"]: "comedy" for q in questions} if golds is None else golds
    write(folder, questions, golds)
    with pytest.raises(PerPcsError, match=message) as caught:
        source = Lamp(folder, task, split=split, queries=0)
        for user_id in source.user_ids():
            source.user(user_id)
    return str(caught.value)


def test_tasks_that_are_not_lamps(tmp_path):
    with pytest.raises(PerPcsError, match=r"data\.task is empty.*lamp-1, lamp-2m.*lamp-7"):
        Lamp(tmp_path, "", split="train", queries=0)
    with pytest.raises(PerPcsError, match=r"'movie-tagging' has no \[lamp\] table.*lamp-1.*lamp-7"):
        Lamp(tmp_path, "movie-tagging", split="train", queries=0)
    with pytest.raises(PerPcsError, match="'lamp-9' is not known"):
        Lamp(tmp_path, "lamp-9", split="train", queries=0)


def test_missing_outputs(tmp_path):
    write(tmp_path, [movie("1", [])], {}, split="test")
    (tmp_path / "test_outputs.json").unlink()
    with pytest.raises(PerPcsError, match=r"test_outputs\.json is not there.*cannot be evaluated"):
        Lamp(tmp_path, "lamp-2m", split="test", queries=0)


def test_missing_gold(tmp_path):
    message = fails(
        tmp_path, [movie("1", []), movie("77", [])], "'77' has no gold", golds={"1": "comedy"}
    )
    assert "train_questions.json, record 2" in message
    assert "train_outputs.json" in message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("id", None, r"record 2: field 'id' is missing; expected text or a whole number"),
        ("id", "1", r"record 2 \(question '1'\): field 'id' is that of an earlier question"),
        ("id", 1.5, r"record 2: field 'id' is 1\.5; expected text or a whole number"),
        ("id", True, r"field 'id' is True; expected"),
        ("input", None, r"record 2 \(question '2'\): field 'input' is missing; expected text"),
        ("input", 3, r"field 'input' is of type int; expected text"),
        ("profile", None, r"field 'profile' is missing; expected an array"),
        ("profile", {}, r"field 'profile' is of type dict; expected an array"),
        ("profile", ["x"], r"question '2'\), profile item 1: field 'id' is missing"),
        ("profile", [{"tag": "t"}], r"question '2'\), profile item 1: field 'id' is missing"),
        ("user_id", " ", r"question '2'\): field 'user_id' is ' '; expected"),
        ("user_id", "q-1", r"question '2'\): two users would be called 'q-1'"),
    ],
)
def test_malformed_questions(tmp_path, field, value, message):
    questions = [movie("1", [item("a")]), {**movie("2", [item("b")]), field: value}]
    found = fails(tmp_path, questions, message, golds={"1": "comedy", "2": "comedy"})
    assert "train_questions.json, record 2" in found
    assert found.split(". ")[-1].startswith("Repair")


def test_missing_field_of_an_item(tmp_path):
    broken = {"id": "b", "tag": "comedy", "text": "x"}
    message = fails(
        tmp_path,
        [movie("1", [item("a"), broken])],
        r"record 1 \(question '1'\), profile item 'b': field 'description' is missing",
    )
    assert "expected the fields of a lamp-2m item. Set data.task" in message


def test_field_of_an_item_that_is_no_text(tmp_path):
    for value, kind in (["comedy"], "list"), ({}, "dict"), (True, "bool"):
        fails(
            tmp_path,
            [movie("1", [{**item("a"), "tag": value}])],
            rf"profile item 'a': field 'tag' is {kind}; expected text or a number. Repair",
        )


def test_date_that_is_none(tmp_path):
    fails(
        tmp_path,
        [movie("1", [item("a", date="May 2015")])],
        r"profile item 'a': field 'date' is 'May 2015'; expected a year or a date such as",
    )


def test_other_wording(tmp_path):
    text = "Translate the following movie: " + "x" * 200
    message = fails(
        tmp_path,
        [{"id": "1", "input": text, "profile": []}],
        r"record 1 \(question '1'\): the input begins 'Translate the following movie: x+'; expected"
        r" the wording of lamp-2m",
    )
    assert "x" * 50 not in message
    assert "data.task" in message


def test_files_of_another_task():
    with pytest.raises(PerPcsError, match="expected the wording of lamp-3"):
        Lamp(FIXTURES / "lamp-4", "lamp-3", split="train", queries=0).user("q-0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"is not JSON"),
        ("[]", r"field 'golds' is missing; expected an array"),
        ('{"golds": {}}', r"field 'golds' is of type dict; expected an array"),
        ('{"golds": [{"output": "x"}]}', r"gold 1: field 'id' is missing"),
        ('{"golds": [{"id": "1"}]}', r"gold 1 \(question '1'\): field 'output' is missing"),
        ('{"golds": [{"id": "1", "output": []}]}', r"field 'output' is list; expected text"),
        (
            '{"golds": [{"id": "1", "output": "x"}, {"id": 1, "output": "x"}]}',
            r"gold 2 \(question '1'\): a second gold",
        ),
    ],
)
def test_malformed_outputs(tmp_path, text, message):
    write(tmp_path, [movie("1", [])], {})
    (tmp_path / "train_outputs.json").write_text(text)
    with pytest.raises(PerPcsError, match=message) as caught:
        Lamp(tmp_path, "lamp-2m", split="train", queries=0)
    assert "train_outputs.json" in str(caught.value)


def test_unknown_user(tmp_path):
    with pytest.raises(
        PerPcsError, match=r"no user 'q-3' in .*expected one of 1 ids such as 'q-1'"
    ):
        open_movies(tmp_path, [movie("1", [])]).user("q-3")
