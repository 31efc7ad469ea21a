"""Reading JSON arrays record by record."""

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_perpcs.data import json_index
from fl_perpcs.data.json_index import Place, load_index, read_records, records
from fl_perpcs.errors import PerPcsError


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\[]{},:😀é')),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(
    values=st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), max_size=6),
    escaped=st.booleans(),
    indent=st.sampled_from([None, 0, 3]),
    chunk=st.integers(min_value=1, max_value=40),
)
def test_records_are_found_whatever_the_chunks(tmp_path_factory, values, escaped, indent, chunk):
    text = json.dumps(values, ensure_ascii=escaped, indent=indent)
    data = text.encode("utf-8", "surrogatepass")
    path = write(tmp_path_factory.getbasetemp() / "any.json", data)
    found = list(records(path, chunk=chunk))
    assert [record.value for record in found] == values
    assert [record.number for record in found] == list(range(1, len(values) + 1))
    for record in found:
        assert json.loads(data[record.offset : record.offset + record.length]) == record.value


def test_offsets_are_bytes(tmp_path):
    path = write(tmp_path / "a.json", ' [ {"a":"é😀"},\r\n{"b" : "\\u00e9"}\t]\n ')
    assert [(r.offset, r.length) for r in records(path)] == [(3, 14), (20, 16)]
    path = write(tmp_path / "b.json", b"\xef\xbb\xbf[{}]")  # a byte order mark
    assert [(r.offset, r.length) for r in records(path)] == [(4, 2)]


@pytest.mark.parametrize(
    ("data", "where", "message"),
    [
        ("", "record 1, byte 0", "the file ends; expected the start of an array"),
        ("  \n", "record 1, byte 3", "the file ends; expected the start of an array"),
        ('{"a": 1}', "record 1, byte 0", "found '{\"a\": 1}'; expected the start of an array"),
        ("<html><body>", "record 1, byte 0", "found '<html><body>', a web page and not JSON"),
        ("[{}, 3]", "record 2, byte 5", "found '3]'; expected an object"),
        ("[{},]", "record 2, byte 4", "found ']'; expected an object"),
        ("[{} {}]", "record 2, byte 4", "found '{}]'; expected a comma or the end of the array"),
        ("[{}", "record 2, byte 3", "the file ends; expected a comma or the end of the array"),
        ('["é"]', "record 1, byte 1", "found '\"é\"]'; expected an object"),
        ('[{"é": 1}, {"é" 1}]', "record 2, byte 18", "it is not JSON (Expecting ':' delimiter)"),
        ('[{}, {"a": "x', "record 2, byte 11", "the file ends within it; expected an object"),
        ('[{}, {"a": tru', "record 2, byte 11", "it is not JSON (Expecting value)"),
        ('[{"a": [1, 2', "record 1, byte 12", "the file ends within it"),
        ("[{}] x", "record 2, byte 5", "found 'x' behind the end of the array; expected nothing"),
        (b'[{"a": "\xff"}]', "record 1, byte 8", "it is not UTF-8; expected JSON in UTF-8"),
        (b'[{}, {"a": "\xc3', "record 2, byte 12", "it is not UTF-8"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 7, json_index.CHUNK])
def test_malformed_files(tmp_path, data, where, message, chunk):
    path = write(tmp_path / "a.json", data)
    with pytest.raises(PerPcsError) as caught:
        list(records(path, chunk=chunk))
    text = str(caught.value)
    assert text.startswith(f"{path}, {where}: ")
    assert "Repair the file or fetch it again" in text
    if chunk > len(data):  # with less in memory, less of what was found is quoted
        assert message in text


def test_deep_nesting(tmp_path):
    path = write(tmp_path / "a.json", '[{"a": ' + "[" * 99_999)
    with pytest.raises(PerPcsError, match="record 1, byte 1: it is nested too deeply"):
        list(records(path))


def test_records_that_are_too_long(tmp_path):
    path = write(tmp_path / "a.json", json.dumps([{"a": "x" * 900}, {"a": "x" * 5000}]))
    assert len(list(records(path, largest=6000, chunk=100))) == 2
    with pytest.raises(PerPcsError, match=r"record 2, byte 912: it is longer than 1\.0 kB"):
        list(records(path, largest=1000, chunk=100))


def test_a_missing_quotation_mark_is_found_at_once(tmp_path):
    good = json.dumps({"a": "x" * 2000})
    path = write(tmp_path / "a.json", f'[{{"a: 1}}, {", ".join([good] * 1000)}]')
    reads = []

    class Counting(json_index._Scanner):
        def _fill(self, size):
            reads.append(size)
            super()._fill(size)

    with path.open("rb") as file, pytest.raises(PerPcsError, match=r"record 1, byte 1\d"):
        list(Counting(path, file, json_index.LARGEST, 1000).records())
    assert sum(reads) < 10_000


def test_missing_file(tmp_path):
    with pytest.raises(PerPcsError, match="does not exist"):
        list(records(tmp_path / "a.json"))
    with pytest.raises(PerPcsError, match="cannot be read"):
        load_index(tmp_path / "a.json", "test", make_owner)


# The index


CALLS = []


def make_owner():
    CALLS.append(1)
    return lambda record, where: (record["user"], record["id"])


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PERPCS_HOME", str(tmp_path / "home"))
    CALLS.clear()
    return tmp_path / "home"


DATA = [{"user": "ä", "id": "1"}, {"user": "b", "id": "2"}, {"user": "ä", "id": "3"}]


def test_index_is_kept(tmp_path, home):
    path = write(tmp_path / "a.json", json.dumps(DATA))
    index = load_index(path, "test", make_owner)
    assert index == {
        "ä": [Place(1, "1", 1, 29), Place(3, "3", 58, 29)],
        "b": [Place(2, "2", 32, 24)],
    }
    assert list(read_records(path, index["b"])) == [DATA[1]]
    assert list(read_records(path, index["ä"])) == [DATA[0], DATA[2]]
    assert load_index(path, "test", make_owner) == index
    assert len(CALLS) == 1
    assert load_index(path, "other", make_owner) == index
    assert len(CALLS) == 2
    (kept, _) = sorted(p for p in (home / "cache" / "json-index").iterdir() if p.suffix == ".json")
    assert kept.stat().st_size < 1000


def test_index_follows_the_file(tmp_path, home):
    path = write(tmp_path / "a.json", json.dumps(DATA))
    load_index(path, "test", make_owner)
    stat = path.stat()
    write(path, json.dumps(DATA[:2]))
    assert len(load_index(path, "test", make_owner)["ä"]) == 1
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    load_index(path, "test", make_owner)
    assert len(CALLS) == 3


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"users": 3}', "null"])
def test_a_damaged_index_is_made_again(tmp_path, home, damage):
    path = write(tmp_path / "a.json", json.dumps(DATA))
    index = load_index(path, "test", make_owner)
    (kept,) = (home / "cache" / "json-index").glob("*.json")
    kept.write_text(damage)
    assert load_index(path, "test", make_owner) == index
    assert json.loads(kept.read_text())["kind"] == "test"


def test_an_index_of_another_version_is_made_again(tmp_path, home, monkeypatch):
    path = write(tmp_path / "a.json", json.dumps(DATA))
    load_index(path, "test", make_owner)
    monkeypatch.setattr(json_index, "VERSION", 99)
    load_index(path, "test", make_owner)
    assert len(CALLS) == 2


def test_nothing_is_kept_of_a_malformed_file(tmp_path, home):
    path = write(tmp_path / "a.json", json.dumps(DATA)[:-3])
    with pytest.raises(PerPcsError, match="record 3"):
        load_index(path, "test", make_owner)
    assert not list((home / "cache" / "json-index").glob("*.json"))


def test_home_that_is_a_file(tmp_path, monkeypatch):
    path = write(tmp_path / "a.json", json.dumps(DATA))
    monkeypatch.setenv("PERPCS_HOME", str(write(tmp_path / "home", "")))
    with pytest.raises(PerPcsError, match=r"cannot be written.*set PERPCS_HOME"):
        load_index(path, "test", make_owner)


def test_a_file_that_changed_while_in_use(tmp_path, home):
    path = write(tmp_path / "a.json", json.dumps(DATA))
    index = load_index(path, "test", make_owner)
    write(path, "[]")
    with pytest.raises(PerPcsError, match="record 2 is not where it was"):
        list(read_records(path, index["b"]))
    path.unlink()
    with pytest.raises(PerPcsError, match="cannot be read any more"):
        list(read_records(path, index["b"]))


def note_owner():
    with open(os.environ["PERPCS_TEST_NOTE"], "a") as file:  # noqa: PTH123
        file.write("built\n")
    return lambda record, where: (record["user"], record["id"])


def index_in_process(path):
    return load_index(path, "test", note_owner)


def test_several_workers_build_it_once(tmp_path, home, monkeypatch):
    monkeypatch.setenv("PERPCS_TEST_NOTE", str(tmp_path / "note"))
    path = write(tmp_path / "a.json", json.dumps(DATA * 20_000))
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("fork")) as pool:
        found = list(pool.map(index_in_process, [path] * 3))
    assert found[0] == found[1] == found[2]
    assert (tmp_path / "note").read_text() == "built\n"


def test_progress_is_shown_when_it_takes_long(tmp_path, home, monkeypatch, capsys):
    path = write(tmp_path / "a.json", json.dumps(DATA))
    load_index(path, "test", make_owner)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(json_index, "PATIENCE", -1.0)
    load_index(path, "other", make_owner)
    shown = capsys.readouterr()
    assert "indexing a.json" in shown.err
    assert shown.out == ""
