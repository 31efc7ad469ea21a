"""The ledger: what it says is what Flower serializes, whatever goes wrong on the way."""

from pathlib import Path

import numpy as np
import pytest
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st
from test_federation import federation

from fl_perpcs import client_app, server_app
from fl_perpcs.config import load_config
from fl_perpcs.grid import PhaseError, UserGrid
from fl_perpcs.ledger import FILE, Entry, Ledger, MeteredGrid, read_ledger
from fl_perpcs.messages import envelope, sender
from fl_perpcs.pool import load_pool
from fl_perpcs.references import References, referred
from fl_perpcs.runs import create_run

QUICK = {"evaluation.references": "", "evaluation.resamples": 0, "run.timeout": 2.0}


pytestmark = pytest.mark.usefixtures("without_report")


def serialized(message: Message) -> int:
    """Return how many bytes Flower sends of a message: each of its objects once."""
    return sum(len(o.deflate()) for o in get_all_nested_objects(message).values())


class Counting(FakeGrid):
    """Serialize every message that passes, as Flower's own grid does."""

    def __init__(self, *args):
        super().__init__(*args)
        self.down, self.up = [], []

    def push_messages(self, messages):
        messages = list(messages)
        ids = super().push_messages(messages)
        self.down += map(serialized, messages)
        return ids

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        self.up += map(serialized, replies)
        return replies


def run(values: dict, grid_type=Counting):
    config = load_config(values)
    grid = grid_type(client_app.app, values, 2)
    server_app.run_federation(grid, config, create_run(config))
    return config, grid


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"exchange.protocol": "layerwise", "exchange.format": "int8"},
        {"exchange.protocol": "server-match", "exchange.match": "by-stages"},
        {"strategy.name": "flora", "averaging.rounds": 2, "averaging.steps": 1},
    ],
    ids=["broadcast", "layerwise", "server match", "flora"],
)
def test_its_sums_are_what_was_serialized_byte_for_byte(small_config, changes):
    config, grid = run(small_config({**QUICK, **changes}))
    entries = read_ledger(Path(config.run.dir))
    for direction, counted in (("down", grid.down), ("up", grid.up)):
        assert sum(e.wire for e in entries if e.direction == direction) == sum(counted)
        assert len([e for e in entries if e.direction == direction]) == len(counted)


RECORDS = st.dictionaries(
    st.sampled_from(["pool", "arrays", "recipe", "odd ä"]),
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.integers(0, 2).map(lambda n: Array(np.zeros(n, np.float32))),
        max_size=3,
    ).map(ArrayRecord),
    max_size=4,
)


@settings(deadline=None)
@given(RECORDS, st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=9), max_size=3))
def test_a_message_weighs_what_flower_makes_of_it(arrays, config):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    records = {**arrays, "config": ConfigRecord(config), "metrics": MetricRecord({"n": 1})}
    grid = MeteredGrid(FakeGrid(ClientApp(), {}), Ledger())
    for _ in range(2):  # records that come again are known already
        message = Message(RecordDict(records), 1000, "train.share")
        grid.push_messages([message])
        entry = grid.ledger.entries[-1]
        assert entry.wire == serialized(message)
    assert entry.arrays == sum(
        len(a.data) for key, r in arrays.items() if key != "recipe" for a in r.values()
    )


def test_phases_users_and_directions_are_told(small_config):
    folder = federation(small_config({**QUICK, "exchange.protocol": "one-shot"}))
    entries = read_ledger(folder)
    assert {(e.phase, e.direction) for e in entries if not e.user} == {
        ("hello", "down"),
        ("hello", "up"),
    }
    phases = list(dict.fromkeys(e.phase for e in entries))
    assert phases == [
        "hello",
        "adapt, round 1, train",
        "embed",
        "share",
        "send gates",
        "evaluate assembled",
    ]
    for phase in phases[1:]:
        found = [e for e in entries if e.phase == phase]
        users = {e.user for e in found}
        assert len(found) == 2 * len(users)
        assert all(e.arrays + e.metadata + e.report < e.wire for e in found)
    # Users come in their order, each first asked and then answering.
    share = [(e.user, e.direction) for e in entries if e.phase == "share"]
    assert share == sorted(share)


def test_it_is_the_same_in_every_run_but_for_reports_and_random_ids(small_config):
    def told(folder):
        return [(e.phase, e.user, e.direction, e.arrays, e.metadata) for e in read_ledger(folder)]

    first = federation(small_config(QUICK, folder="a"))
    assert told(first) == told(federation(small_config(QUICK, folder="b")))


class Losing(Counting):
    """Lose the first reply of a phase."""

    lost = 0

    def pull_messages(self, message_ids):
        replies = FakeGrid.pull_messages(self, message_ids)
        for reply in replies:
            if reply.metadata.message_type == "train.share" and not self.lost:
                self.lost += 1
                replies = [other for other in replies if other is not reply]
        self.up += map(serialized, replies)
        return replies


def test_a_lost_reply_leaves_a_whole_ledger_and_no_pool(small_config, tmp_path):
    with pytest.raises(PhaseError, match="no reply"):
        run(small_config(QUICK), Losing)
    folder = tmp_path / "run"
    share = [e for e in read_ledger(folder) if e.phase == "share"]
    assert len([e for e in share if e.direction == "down"]) == 3
    assert len([e for e in share if e.direction == "up"]) == 2
    assert not (folder / "pool").exists()
    assert not list(folder.glob(f".{FILE}*"))


class Twice(Counting):
    """Every reply comes a second time, with the next ones."""

    def __init__(self, *args):
        super().__init__(*args)
        self.again = []

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        repeated, self.again = self.again, list(replies)
        self.up += map(serialized, repeated)
        return repeated + replies


def test_a_repeated_reply_is_counted_and_changes_nothing_else(small_config, tmp_path):
    once = federation(small_config(QUICK, folder="once"))
    _, grid = run(small_config(QUICK), Twice)
    folder = tmp_path / "run"
    up = [e for e in read_ledger(folder) if e.direction == "up"]
    assert sum(e.wire for e in up) == sum(grid.up)
    assert len(up) > len([e for e in read_ledger(once) if e.direction == "up"])
    assert all(e.user for e in up if e.phase != "hello")
    names = ("recipes.json", "predictions/assembled.jsonl", "metrics.jsonl", "results.json")
    for name in names:
        assert (folder / name).read_bytes() == (once / name).read_bytes()
    assert load_pool(folder / "pool").pieces.keys() == load_pool(once / "pool").pieces.keys()


def test_an_error_is_entered_as_one(small_config, tmp_path, monkeypatch):
    from fl_perpcs import users

    def broken(job):
        raise ValueError("no")

    monkeypatch.setattr(users, "make_pieces", broken)
    with pytest.raises(PhaseError):
        run(small_config(QUICK))
    failed = [e for e in read_ledger(tmp_path / "run") if e.error]
    assert {(e.phase, e.direction, e.arrays) for e in failed} == {("share", "up", 0)}
    assert all(e.wire > 0 for e in failed)


def test_a_message_that_flower_does_not_take_is_not_entered():
    class Full(FakeGrid):
        def push_messages(self, messages):
            return []

    grid = MeteredGrid(Full(ClientApp(), {}), Ledger())
    users = UserGrid(grid, {"ann": 1000}, ["ann"], phase="share")
    with pytest.raises(PhaseError, match="took no message"):
        list(users.exchange([Message(RecordDict(), 1, "train.share")]))
    assert grid.ledger.entries == []


def test_what_is_sent_twice_is_entered_twice():
    app = ClientApp()

    @app.train("share")
    def share(message, context):
        return Message(RecordDict(), reply_to=message)

    grid = MeteredGrid(FakeGrid(app, {}), Ledger())
    users = UserGrid(grid, {"ann": 1000}, ["ann"], phase="share")
    messages = [Message(RecordDict(), 1, "train.share") for _ in range(2)]
    assert [sender(reply) for reply in users.exchange(messages)] == ["ann", "ann"]
    assert [(e.user, e.direction) for e in grid.ledger.entries] == [
        ("ann", "down"),
        ("ann", "down"),
        ("ann", "up"),
        ("ann", "up"),
    ]


def test_an_empty_ledger_is_a_file_too(tmp_path):
    Ledger().save(tmp_path)
    assert read_ledger(tmp_path) == []
    Ledger([Entry("p", "u", "m", "up", 1, 2, 3, 9)]).save(tmp_path)
    assert read_ledger(tmp_path)[0].wire == 9


def test_a_shared_record_is_written_once_and_read_back(tmp_path):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    pool = ArrayRecord({"a": Array(np.arange(6, dtype=np.int8).reshape(2, 3))})
    references = References(tmp_path)
    sent = [
        references.put(
            Message(RecordDict({"pool": pool, "e": envelope("u", "p")}), 1, "query.choose")
        )
        for _ in range(3)
    ]
    assert len(list((tmp_path / "by-reference").iterdir())) == 1
    for message in sent:
        arrays = referred(message.content.config_records["pool"])
        assert arrays["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert arrays["a"].dtype == np.int8


@pytest.mark.parametrize("path", ["/etc/passwd", "/tmp/x/pool.safetensors"])
def test_a_reference_to_any_other_file_is_refused(path):
    with pytest.raises(Exception, match="no file of a run's by-reference folder"):
        referred(ConfigRecord({"file": path}))


def test_a_reference_to_a_file_that_is_not_there_names_the_setting(tmp_path):
    path = tmp_path / "by-reference" / "0.safetensors"
    with pytest.raises(Exception, match=r"exchange\.by-reference is for nodes that share"):
        referred(ConfigRecord({"file": str(path)}))


def test_error_replies_weigh_what_flower_makes_of_them():
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    asked = Message(RecordDict(), 1000, "train.share")
    reply = Message(Error(code=1, reason="no"), reply_to=asked)
    grid = MeteredGrid(FakeGrid(ClientApp(), {}), Ledger())
    assert grid._sizes.of(reply) == (0, 0, 0, serialized(reply))
