"""Fetching LaMP's files from a server on this machine."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from fl_perpcs.cli import app
from fl_perpcs.data.lamp import Lamp, default_folder
from fl_perpcs.errors import PerPcsError
from fl_perpcs.fetch import download
from fl_perpcs.fetch.lamp import fetch_lamp

MOVIE = (
    "Which tag does this movie relate to among the following tags? Just answer with the tag name"
    " without further explanation. tags: [comedy] description: A film."
)
QUESTIONS = json.dumps(
    [
        {
            "id": str(i),
            "input": MOVIE,
            "profile": [
                {"id": f"{i}-{j}", "tag": "comedy", "description": "D" * 500} for j in "ab"
            ],
        }
        for i in range(40)
    ]
).encode()
OUTPUTS = json.dumps(
    {"task": "LaMP_2", "golds": [{"id": str(i), "output": "comedy"} for i in range(40)]}
).encode()
PAGE = b"<!DOCTYPE html><html><body>not here</body></html>"


class Server:
    """Files by path, and how they are served."""

    def __init__(self):
        self.files = {
            "/LaMP_2/new/train/train_questions.json": QUESTIONS,
            "/LaMP_2/new/train/train_outputs.json": OUTPUTS,
            "/time/LaMP_2/new/dev/dev_questions.json": QUESTIONS,
            "/time/LaMP_2/new/dev/dev_outputs.json": OUTPUTS,
            "/LaMP_2/new/test/test_questions.json": QUESTIONS,
        }
        self.ranges = True  # whether it can send a part
        self.etag = '"one"'
        self.cut = []  # how many bytes the next answers send before they break off
        self.status = 0  # answered to everything, if set
        self.length = True  # whether it says how long a file is
        self.asked = []  # path and Range of each request


def handler(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *_):
            pass

        def do_GET(self):
            wanted = self.headers.get("Range")
            server.asked.append((self.path, wanted))
            data = server.files.get(self.path)
            if server.status:
                self.answer(server.status, b"", {})
            elif data is None:  # as LaMP's own server does
                self.answer(200, PAGE, {"Content-Type": "text/html; charset=utf-8"})
            elif wanted and server.ranges and self.headers["If-Range"] in (None, server.etag):
                self.part(data, int(wanted.removeprefix("bytes=").removesuffix("-")))
            else:
                self.answer(200, data, {})

        def part(self, data, start):
            if start >= len(data):
                self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            else:
                where = f"bytes {start}-{len(data) - 1}/{len(data)}"
                self.answer(206, data[start:], {"Content-Range": where})

        def answer(self, status, data, headers):
            self.send_response(status)
            headers = {"Content-Type": "application/json", "ETag": server.etag, **headers}
            for name, value in headers.items():
                if value:
                    self.send_header(name, value)
            if server.length:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: server.cut.pop(0)] if server.cut else data)

    return Handler


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setattr(download, "CHUNK", 1000)
    monkeypatch.setenv("PERPCS_HOME", str(tmp_path / "home"))
    state = Server()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(state)) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        state.url = f"http://127.0.0.1:{http.server_port}"
        yield state
        http.shutdown()
        thread.join()


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


WHOLE = ["manifest.json", "train_outputs.json", "train_questions.json"]
ASKED = "/LaMP_2/new/train/train_questions.json"


def test_whole(server):
    folder = fetch_lamp("LaMP-2M", url=f"{server.url}/")
    assert folder == default_folder("lamp-2m")
    assert names(folder) == WHOLE
    assert (folder / "train_questions.json").read_bytes() == QUESTIONS
    entry = json.loads((folder / "manifest.json").read_text())["files"]["train_questions.json"]
    assert entry.pop("date").startswith("20")
    assert entry == {
        "url": f"{server.url}{ASKED}",
        "size": len(QUESTIONS),
        "sha256": hashlib.sha256(QUESTIONS).hexdigest(),
    }
    assert len(Lamp("", "lamp-2m", split="train", queries=0).user_ids()) == 40
    count = len(server.asked)
    fetch_lamp("lamp-2m", url=server.url)
    assert len(server.asked) == count  # nothing is left to do


def test_time_and_test(server, capsys):
    folder = fetch_lamp("lamp-2M", "dev", "time", server.url)
    assert folder == default_folder("lamp-2m", "time")
    assert folder.name == "lamp-2m-time"
    hint = f"use with: data.source=lamp data.task=lamp-2m data.split=dev data.path={folder}"
    assert hint in capsys.readouterr().err
    folder = fetch_lamp("lamp-2m", "test", url=server.url)
    assert names(folder) == ["manifest.json", "test_questions.json"]
    assert "no outputs" in capsys.readouterr().err


def test_splits_share_a_manifest(server, tmp_path):
    fetch_lamp("lamp-2m", "test", url=server.url, dest=tmp_path / "a")
    fetch_lamp("lamp-2m", "train", url=server.url, dest=tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert sorted(manifest["files"]) == [
        "test_questions.json",
        "train_outputs.json",
        "train_questions.json",
    ]


@pytest.mark.parametrize("etag", ['"one"', "", 'W/"one"'])
def test_broken_off_and_resumed(server, etag):
    server.etag = etag
    server.cut = [3000, 5000]
    folder = fetch_lamp("lamp-2m", url=server.url)
    assert names(folder) == WHOLE
    assert (folder / "train_questions.json").read_bytes() == QUESTIONS
    assert [wanted for path, wanted in server.asked if path == ASKED] == [
        None,
        "bytes=3000-",
        "bytes=8000-",
    ]


def given_up(server, **change):
    """Fetch until it gives up with half a file, then change how the server answers."""
    server.cut = [3000] + [0] * download.ATTEMPTS
    with pytest.raises(PerPcsError, match=r"run the command again: it goes on where it broke off"):
        fetch_lamp("lamp-2m", url=server.url)
    folder = default_folder("lamp-2m")
    assert names(folder) == ["train_questions.json.part", "train_questions.json.part.json"]
    assert (folder / "train_questions.json.part").stat().st_size == 3000
    server.cut, server.asked = [], []
    for name, value in change.items():
        setattr(server, name, value)
    return folder


def test_resumed_by_the_next_command(server):
    folder = given_up(server)
    fetch_lamp("lamp-2m", url=server.url)
    assert server.asked[0] == (ASKED, "bytes=3000-")
    assert (folder / "train_questions.json").read_bytes() == QUESTIONS
    assert names(folder) == WHOLE


def test_a_server_without_ranges_starts_anew(server):
    folder = given_up(server, ranges=False)
    fetch_lamp("lamp-2m", url=server.url)
    assert server.asked[:2] == [
        (ASKED, "bytes=3000-"),
        ("/LaMP_2/new/train/train_outputs.json", None),
    ]
    assert (folder / "train_questions.json").read_bytes() == QUESTIONS


def test_another_version_starts_anew(server):
    other = QUESTIONS.replace(b"D" * 500, b"E" * 500)
    folder = given_up(server, etag='"two"', files={**server.files, ASKED: other})
    fetch_lamp("lamp-2m", url=server.url)
    assert (folder / "train_questions.json").read_bytes() == other


@pytest.mark.parametrize("other", [QUESTIONS.replace(b"D" * 500, b"E" * 510), QUESTIONS[:2000]])
def test_another_size_starts_anew(server, other):
    server.etag = ""
    folder = given_up(server, files={**server.files, ASKED: other})
    if len(other) > 3000:
        fetch_lamp("lamp-2m", url=server.url)
        assert (folder / "train_questions.json").read_bytes() == other
    else:  # a shorter file, and a broken one
        with pytest.raises(PerPcsError, match="the file ends within it"):
            fetch_lamp("lamp-2m", url=server.url)
    assert [wanted for path, wanted in server.asked if path == ASKED] == ["bytes=3000-", None]


def test_half_a_file_of_another_address_starts_anew(server):
    given_up(server)
    server.files = {f"/mirror{path}": data for path, data in server.files.items()}
    fetch_lamp("lamp-2m", url=f"{server.url}/mirror")
    assert server.asked[0] == (f"/mirror{ASKED}", None)


def test_a_whole_part_is_not_fetched_again(server):
    folder = given_up(server)
    (folder / "train_questions.json.part").write_bytes(QUESTIONS)
    fetch_lamp("lamp-2m", url=server.url)
    assert server.asked[0] == (ASKED, f"bytes={len(QUESTIONS)}-")
    assert (folder / "train_questions.json").read_bytes() == QUESTIONS


def test_html_instead_of_json(server):
    with pytest.raises(PerPcsError, match=r"train_questions\.json: the server answers with a web"):
        fetch_lamp("lamp-2m", url=f"{server.url}/wrong")
    assert names(default_folder("lamp-2m")) == []


def test_html_that_says_it_is_json(server):
    server.files[ASKED] = b"\n" + PAGE
    with pytest.raises(PerPcsError, match=r"a web page; expected a JSON file.*check --url"):
        fetch_lamp("lamp-2m", url=server.url)
    assert names(default_folder("lamp-2m")) == []


@pytest.mark.parametrize("length", [True, False])
def test_truncated(server, length):
    server.length = length
    server.cut = [3000] * 99
    server.ranges = False
    message = "of 44630 bytes|IncompleteRead" if length else r"record 3, byte \d+: the file ends"
    with pytest.raises(PerPcsError, match=message.replace("44630", str(len(QUESTIONS)))):
        fetch_lamp("lamp-2m", url=server.url)
    assert "train_questions.json" not in names(default_folder("lamp-2m"))


def test_without_a_length(server):
    server.length = False
    assert names(fetch_lamp("lamp-2m", url=server.url)) == WHOLE


def test_404(server):
    server.status = 404
    with pytest.raises(
        PerPcsError, match=r"train_questions\.json: the server answers 404 Not Found"
    ):
        fetch_lamp("lamp-2m", url=server.url)
    assert len(server.asked) == 1


def test_503_is_tried_again(server):
    server.status = 503
    with pytest.raises(PerPcsError, match="the server answers 503 Service Unavailable"):
        fetch_lamp("lamp-2m", url=server.url)
    assert len(server.asked) == download.ATTEMPTS


def test_no_server_and_no_address(server):
    with pytest.raises(PerPcsError, match=r"cannot be downloaded.*Check the connection"):
        fetch_lamp("lamp-2m", url="http://127.0.0.1:9")
    with pytest.raises(PerPcsError, match=r"cannot be downloaded.*Check --url"):
        fetch_lamp("lamp-2m", url="nowhere")


@pytest.mark.parametrize(
    ("path", "data", "message"),
    [
        (ASKED, b'{"golds": []}', "expected the start of an array"),
        (ASKED, b"[]", "has no questions"),
        (ASKED, b"hello", "this is not JSON"),
        (
            ASKED,
            b'[{"id": "1", "input": "x"}]',
            "record 1 .question '1'.: field 'profile' is missing",
        ),
        (ASKED.replace("questions", "outputs"), b"[]", "field 'golds' is missing"),
        (
            ASKED.replace("questions", "outputs"),
            b'{"golds": [{"id": "0", "output": "x"}]}',
            r"question '1' has no gold in .*\(39 such\)",
        ),
    ],
)
def test_files_of_another_form(server, path, data, message):
    server.files[path] = data
    with pytest.raises(PerPcsError, match=message):
        fetch_lamp("lamp-2m", url=server.url)
    assert not [name for name in names(default_folder("lamp-2m")) if name.endswith(".json")]
    server.files = Server().files  # and then they are put right
    assert names(fetch_lamp("lamp-2m", url=server.url)) == WHOLE


def test_files_of_someone_else_are_left_alone(server, tmp_path):
    (tmp_path / "train_outputs.json").write_text("mine")
    with pytest.raises(PerPcsError, match=r"train_outputs\.json is there, but not as manifest"):
        fetch_lamp("lamp-2m", url=server.url, dest=tmp_path)
    assert (tmp_path / "train_outputs.json").read_text() == "mine"
    assert not server.asked


def test_what_cannot_be_fetched(server):
    with pytest.raises(PerPcsError, match=r"lamp-6 cannot be downloaded.*Avocado.*catalog\.ldc"):
        fetch_lamp("LaMP-6", url=server.url)
    with pytest.raises(PerPcsError, match="'movie-tagging' has no"):
        fetch_lamp("movie-tagging", url=server.url)
    with pytest.raises(PerPcsError, match="is empty; name the task"):
        fetch_lamp("", url=server.url)
    with pytest.raises(PerPcsError, match="--split all is not known; expected one of train, dev"):
        fetch_lamp("lamp-1", "all", url=server.url)
    with pytest.raises(PerPcsError, match="--separation both is not known; expected one of user"):
        fetch_lamp("lamp-1", "dev", "both", url=server.url)
    assert not server.asked


def test_command(server):
    words = ["fetch", "lamp", "--task", "LaMP-2M", "--url", server.url]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0
    assert shown.stdout.strip() == str(default_folder("lamp-2m"))
    assert "data.task=lamp-2m data.split=train" in shown.stderr
    shown = CliRunner().invoke(app, ["fetch", "gpt"])
    assert shown.exit_code == 1
    assert "expected one of smollm2, minilm, debian-synopsis, lamp" in shown.stderr
    shown = CliRunner().invoke(app, ["fetch", "smollm2", "--task", "LaMP-2M"])
    assert shown.exit_code == 1
    assert "--task and --url go with lamp only" in shown.stderr
