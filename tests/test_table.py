"""The source of tables: files of every kind, and a Hugging Face name."""

import json
import subprocess
import sys
from datetime import date, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from fl_perpcs.config import DataSection
from fl_perpcs.data import Source
from fl_perpcs.data import table as table_module
from fl_perpcs.data.table import Table
from fl_perpcs.errors import PerPcsError

ROWS = [
    {"user": "b", "input": "one", "output": "first"},
    {"user": "a", "input": "two", "output": "second"},
    {"user": "b", "input": "three", "output": "third"},
    {"user": "a", "input": "four", "output": "fourth"},
    {"user": "b", "input": "five", "output": "fifth"},
]


def section(path="", **keys) -> DataSection:
    defaults = {"source": "table", "task": "debian-synopsis", "queries": 1}
    return DataSection(**{**defaults, "path": str(path), **keys})


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def csv_text(rows, sep=","):
    return "".join(sep.join(map(str, row)) + "\n" for row in [rows[0], *(r.values() for r in rows)])


def write(folder, kind, rows=ROWS):
    path = folder / f"items{kind}"
    if kind == ".jsonl":
        return jsonl(path, rows)
    if kind == ".json":
        path.write_text(json.dumps(rows))
    elif kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(csv_text(rows, "\t" if kind == ".tsv" else ","))
    return path


def error_of(data: DataSection) -> str:
    with pytest.raises(PerPcsError) as caught:
        source = Table(data)
        for user in source.user_ids():
            source.user(user)
    return str(caught.value)


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet", ".csv", ".tsv"])
def test_every_kind_of_file_gives_the_same_users(tmp_path, kind):
    source: Source = Table(section(write(tmp_path, kind)))
    assert source.user_ids() == ["a", "b"]
    b = source.user("b")
    assert [(e.input, e.output) for e in b.history] == [("one", "first"), ("three", "third")]
    assert [(e.input, e.output) for e in b.queries] == [("five", "fifth")]
    assert [e.id for e in b.history] == [f"items{kind}:1", f"items{kind}:3"]
    assert source.task.name == "debian-synopsis"
    assert (b.group, b.role, source.dropped("b"), source.left_out) == ("", "", 0, 0)


def test_a_folder_is_read_in_the_order_of_its_files_names_whatever_their_kinds(tmp_path):
    jsonl(tmp_path / "2.jsonl", [{"user": 7, "input": "c", "output": "x", "more": [1]}])
    (tmp_path / "1.csv").write_text("output,user,input\nx,7,a\nx,07,z\nx,7,b\n")
    (tmp_path / "readme.txt").write_text("not a table")
    (tmp_path / ".hidden.csv").write_text("nor this")
    source = Table(section(tmp_path))
    assert source.user_ids() == ["7"]
    user = source.user("7")
    assert [e.id for e in (*user.history, *user.queries)] == ["1.csv:1", "1.csv:3", "2.jsonl:1"]
    assert source.left_out == 1


def test_columns_may_have_other_names_and_items_no_input(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", [{"who": "a", "tweet": f"t{i}"} for i in range(3)])
    source = Table(section(path, user_column="who", input_column="", output_column="tweet"))
    assert [(e.input, e.output) for e in source.user("a").history] == [("", "t0"), ("", "t1")]
    both = section(path, user_column="who", input_column="tweet", output_column="tweet")
    assert Table(both).user("a").queries[0].input == "t2"


@pytest.mark.parametrize(
    "times",
    [
        [3, 1, 2],
        [3.5, -1.0, 2],
        ["3", "1", "2.5"],
        ["2024-03-01", "2023-12-31", "2024-02-29"],
        ["2024-03-01T00:00:00+02:00", "2024-02-29T10:00:00Z", "2024-02-29 21:00"],
        [date(2024, 3, 1), date(2023, 12, 31), date(2024, 2, 29)],
        [datetime(2024, 3, 1, 2), datetime(2024, 3, 1, 1), datetime(2024, 3, 1, 1, 0, 0, 1)],
    ],
)
def test_items_are_put_in_the_order_of_time(tmp_path, times):
    rows = [{"user": "a", "input": str(i), "output": "x", "t": t} for i, t in enumerate(times)]
    if isinstance(times[0], date):
        data = section(write(tmp_path, ".parquet", rows), time_column="t")
    else:
        data = section(jsonl(tmp_path / "t.jsonl", rows), time_column="t")
    user = Table(data).user("a")
    assert [e.input for e in (*user.history, *user.queries)] == ["1", "2", "0"]


def test_items_of_one_time_stay_in_the_order_of_the_rows(tmp_path):
    rows = [{"user": "a", "input": str(i), "output": "x", "t": i // 4} for i in range(8)]
    user = Table(section(jsonl(tmp_path / "t.jsonl", rows), time_column="t", queries=0)).user("a")
    assert [e.input for e in user.history] == list("01234567")


def test_values_become_text_and_rows_without_an_output_are_dropped(tmp_path):
    values = [(1, 2.0), (True, 2.5), (None, " x "), ("y", None), ("y", " \n"), ("y", False)]
    rows = [{"user": 7.0, "input": i, "output": o} for i, o in values]
    source = Table(section(jsonl(tmp_path / "t.jsonl", rows), queries=0))
    assert source.user_ids() == ["7"]
    found = [(e.input, e.output) for e in source.user("7").history]
    assert found == [("1", "2"), ("true", "2.5"), ("", "x"), ("y", "false")]
    assert source.dropped("7") == 2


def test_csv_cells_are_text_as_they_stand(tmp_path):
    (tmp_path / "t.csv").write_bytes(
        b'\xef\xbb\xbfuser,input,output\n007,"a, b",null\n007,NA,1.0\n007,,"two\nlines"\n'
    )
    user = Table(section(tmp_path / "t.csv", queries=0)).user("007")
    found = [(e.input, e.output) for e in user.history]
    assert found == [("a, b", "null"), ("NA", "1.0"), ("", "two\nlines")]


def test_users_with_no_more_rows_than_queries_are_left_out_and_counted(tmp_path):
    rows = [*ROWS, {"user": "c", "input": "x", "output": None}]
    source = Table(section(jsonl(tmp_path / "t.jsonl", rows), queries=2))
    assert (source.user_ids(), source.left_out) == (["b"], 2)
    with pytest.raises(PerPcsError, match=r"no user 'a' with more than 2 rows in .*such as 'b'"):
        source.user("a")
    message = error_of(section(tmp_path / "t.jsonl", queries=3))
    assert "none of 3 users has more than data.queries = 3 rows" in message
    assert "the most are 3" in message


def test_labels_are_checked_with_the_row_and_the_labels(tmp_path):
    rows = [{"user": "a", "input": "x", "output": o} for o in (5, 4.0, "6")]
    message = error_of(section(jsonl(tmp_path / "t.jsonl", rows), task="lamp-3"))
    for part in ("t.jsonl, row 3", "'output' is '6'", "task 'lamp-3'", "1, 2, 3, 4, 5"):
        assert part in message
    rows[2]["output"] = None
    assert len(Table(section(jsonl(tmp_path / "t.jsonl", rows), task="lamp-3")).user_ids()) == 1


BAD_ROWS = {
    "no user": ({"user": None}, "t.jsonl, row 6: column 'user' is empty"),
    "blank user": ({"user": " "}, "t.jsonl, row 6: column 'user' is empty"),
    "list": ({"user": ["b"]}, "t.jsonl, row 6: column 'user' is ['b']; expected text, a number"),
    "list of inputs": ({"input": ["x"]}, "t.jsonl, row 6: column 'input' is ['x']"),
    "no time": ({"t": None}, "t.jsonl, row 6: column 't' is empty; expected a number or a date"),
    "odd time": ({"t": "soon"}, "t.jsonl, row 6: column 't' is 'soon'; expected a number or a"),
    "other time": ({"t": "2024-05-31"}, "row 6: column 't' is '2024-05-31', but in"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named(tmp_path, case):
    changes, expected = BAD_ROWS[case]
    rows = [{**row, "t": i} for i, row in enumerate(ROWS)]
    path = jsonl(tmp_path / "t.jsonl", [*rows, {**rows[0], **changes}])
    assert expected in error_of(section(path, time_column="t"))


@pytest.mark.parametrize("column", ["user", "input", "output", "time"])
def test_a_missing_column_is_named_with_those_there_are_and_the_key(tmp_path, column):
    path = write(tmp_path, ".csv")
    message = error_of(section(path, **{f"{column}_column": "who"}))
    assert f"{path} has no column 'who'; it has user, input, output" in message
    assert f"data.{column}-column" in message


BAD_FILES = {
    "broken.jsonl": (b'{"user": ', "cannot be read"),
    "empty.json": (b"", "has no rows"),
    "empty.csv": (b"user,input,output\n", "has no rows"),
    "latin.csv": (b"user,input,output\n\xff,b,c\n", "cannot be read"),
    "latin-name.csv": (b"us\xffer,input,output\n", "expected UTF-8 text"),
    "twice.csv": (b"user,user,output\na,b,c\n", "two columns 'user'"),
    "ragged.csv": (b"user,input,output\na,b,c\na,b,c,d\n", "cannot be read"),
    "no.parquet": (b"PAR1", "cannot be read"),
    "notes.txt": (b"user", "expected a file that ends in .jsonl"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(tmp_path, name, capfd):
    content, expected = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    message = error_of(section(tmp_path / name))
    assert str(tmp_path / name) in message
    assert expected in message
    assert "\n" not in message
    assert capfd.readouterr() == ("", "")


def test_a_path_that_is_not_there_or_holds_no_table(tmp_path):
    assert "does not exist" in error_of(section(tmp_path / "no.csv"))
    (tmp_path / "folder").mkdir()
    assert "has no table; expected files that end in .jsonl" in error_of(
        section(tmp_path / "folder")
    )


@pytest.fixture
def hub(monkeypatch):
    asked = []

    def load_dataset(*args, cache_dir, **options):
        asked.append((args, options))
        if args[0] == "owner/gone":
            raise ConnectionError("Couldn't reach 'owner/gone' on the Hub")
        return Dataset.from_list(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


def test_a_hugging_face_name(hub):
    source = Table(section(dataset="owner/name:small", split="validation"))
    assert hub == [(("owner/name", "small"), {"split": "validation"})]
    assert [e.id for e in source.user("a").history] == ["owner/name:small:2"]
    message = error_of(section(dataset="owner/gone"))
    assert "data.dataset = 'owner/gone', data.split = 'train' cannot be read: Couldn't" in message


@pytest.mark.parametrize("name", ["../x", "/abs/olute", "a/b/c", "https://x", "tests"])
def test_a_name_that_could_be_a_path_is_refused(hub, name, monkeypatch, tmp_path):
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "set data.path to an absolute path" in error_of(section(dataset=name))
    assert not hub


def test_only_row_numbers_are_held_and_batches_do_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(table_module, "BATCH", 2)
    source = Table(section(write(tmp_path, ".parquet")))
    assert source.user("b").queries[0].input == "five"
    assert [list(rows) for rows in source._rows.values()] == [[1, 3], [0, 2, 4]]


def test_a_changed_file_is_read_again(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", ROWS)
    Table(section(path))
    jsonl(path, [{**row, "output": "new and longer"} for row in ROWS])
    assert Table(section(path)).user("a").queries[0].output == "new and longer"


OPEN = """
import sys
from fl_perpcs.config import DataSection
from fl_perpcs.data.table import Table
data = DataSection(source="table", task="debian-synopsis", queries=1, path=sys.argv[1])
print(Table(data).user("b").queries[0].output)
"""


def test_several_processes_may_open_a_table_at_once_and_print_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PERPCS_HOME", str(tmp_path / "home"))
    path = write(tmp_path, ".jsonl")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", OPEN, str(path)], **pipes) for _ in range(3)]
    assert [process.communicate() for process in started] == [("fifth\n", "")] * 3
