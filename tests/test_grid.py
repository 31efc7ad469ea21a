"""The grid whose nodes are users: order, window, errors, and Flower's own strategies on it."""

import random
from collections.abc import Iterable

import numpy as np
import pytest
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, FedProx

from fl_perpcs import grid as grid_module
from fl_perpcs.grid import PhaseError, UserGrid, client_error
from fl_perpcs.messages import ENVELOPE, WORKER, open_envelope, sender

USERS = tuple(f"user-{i}" for i in range(9))
NODES = 3


def echo(message: Message, context) -> Message:
    """Answer with the user that the message names and the node it went to."""
    user, phase = open_envelope(message)
    content = RecordDict(
        {
            "metrics": MetricRecord({"number": int(user.split("-")[1])}),
            WORKER: ConfigRecord({"node": context.node_id}),
            "phase": ConfigRecord({"phase": phase}),
        }
    )
    return Message(content, reply_to=message)


class SlowGrid(FakeGrid):
    """Hands replies out one at a time, the one that was asked for last first."""

    def __init__(self, *args, twice: bool = False, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.most_waiting = 0
        self.twice = twice
        self.last: Message | None = None

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        ids = [i for i in message_ids if i in self.waiting]
        replies = super().pull_messages(ids[-1:])
        if self.twice and self.last is not None:
            replies = [self.last, *replies, *replies]
        self.last = replies[-1] if replies else self.last
        return replies


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(grid_module, "POLL_SECONDS", 0.001)


def grid_over(inner: FakeGrid, **options) -> UserGrid:
    nodes = inner.get_node_ids()
    hosts = {user: nodes[i % len(nodes)] for i, user in enumerate(USERS)}
    return UserGrid(inner, hosts, users=USERS, phase="test", **options)


def messages_to(grid: UserGrid, users=USERS) -> list[Message]:
    return [Message(RecordDict(), grid.address(user), "query.echo") for user in users]


def test_what_is_attached_is_sent_until_a_user_has_answered_one_that_carried_it():
    inner = FakeGrid(echo, {}, NODES)
    large, small, own = ConfigRecord({"n": 1}), ConfigRecord({"n": 2}), ConfigRecord({"n": 3})
    grid = grid_over(inner, attached={"base": large}, later={"base": small})

    def sent(content: dict) -> list[int]:
        before = len(inner.sent)
        messages = [Message(RecordDict(content), grid.address(u), "query.echo") for u in USERS[:2]]
        list(grid.only(USERS, "another phase").exchange(messages))
        return [message.content["base"]["n"] for message in inner.sent[before:]]

    assert sent({"base": own}) == [3, 3]  # carries something else: nothing is held yet
    assert sent({}) == [1, 1]
    assert sent({}) == [2, 2]
    assert sent({"base": own}) == [3, 3]


@pytest.mark.parametrize("window", [1, 2, 4, 100])
@pytest.mark.parametrize("twice", [False, True])
def test_replies_come_in_the_order_of_the_messages_whatever_arrives_first(window, twice):
    inner = SlowGrid(echo, {}, NODES, twice=twice)
    grid = grid_over(inner, window=window)
    order = [USERS[i] for i in (4, 0, 8, 2, 6, 1, 7, 3, 5)]
    replies = list(grid.exchange(messages_to(grid, order)))
    assert [sender(reply) for reply in replies] == order
    numbers = [reply.content["metrics"]["number"] for reply in replies]
    assert numbers == [4, 0, 8, 2, 6, 1, 7, 3, 5]
    assert inner.most_waiting <= window
    assert len(inner.sent) == len(order)


def test_each_message_goes_to_the_node_that_hosts_the_user_with_user_and_phase():
    inner = FakeGrid(echo, {}, NODES)
    grid = grid_over(inner)
    for reply in grid.exchange(messages_to(grid)):
        assert reply.content[WORKER]["node"] == grid.hosts[sender(reply)]
        assert reply.content["phase"]["phase"] == "test"
    assert {m.metadata.dst_node_id for m in inner.sent} == set(inner.get_node_ids())
    assert [open_envelope(m)[0] for m in inner.sent] == list(USERS)


def test_the_server_stamps_who_replied_whatever_the_reply_says():
    def liar(message, context):
        content = RecordDict({ENVELOPE: ConfigRecord({"user": "somebody-else"})})
        return Message(content, reply_to=message)

    grid = grid_over(SlowGrid(liar, {}, NODES))
    assert [sender(reply) for reply in grid.exchange(messages_to(grid))] == list(USERS)


def test_messages_are_made_only_when_there_is_room_for_them():
    inner, made, open_at_once = FakeGrid(echo, {}, NODES), [], []
    grid = grid_over(inner, window=3)

    def lazily():
        for message in messages_to(grid):
            made.append(message)
            open_at_once.append(len(made) - len(received))
            yield message

    received: list[Message] = []
    for reply in grid.exchange(lazily()):
        received.append(reply)
    assert len(made) == len(received) == len(USERS)
    # The reply that is being handed on counts as open until the consumer asks for more.
    assert max(open_at_once) <= 3 + 1


def test_nothing_is_sent_before_the_first_reply_is_asked_for():
    inner = FakeGrid(echo, {}, NODES)
    grid = grid_over(inner)
    exchange = grid.exchange(messages_to(grid))
    assert inner.sent == []
    next(exchange)
    assert inner.sent


def test_no_messages_are_no_replies():
    grid = grid_over(FakeGrid(echo, {}, NODES))
    assert list(grid.exchange([])) == []
    assert grid.send_and_receive([]) == []


@pytest.mark.parametrize("twice", [False, True])
def test_progress_counts_users_as_they_answer_and_the_record_keeps_the_order(twice):
    progress, record = [], []
    grid = grid_over(
        SlowGrid(echo, {}, NODES, twice=twice),
        window=4,
        progress=lambda *facts: progress.append(facts),
        record=lambda *facts: record.append(facts),
    )
    list(grid.exchange(messages_to(grid)))
    assert progress == [("test", done, 9) for done in range(10)]
    assert record == [
        ("test", user, {"number": i}, {"node": grid.hosts[user]}) for i, user in enumerate(USERS)
    ]


def test_a_user_that_fails_ends_the_phase_with_its_name_and_its_words():
    def fails(message, context):
        if open_envelope(message)[0] == "user-5":
            raise ValueError("its history is on fire")
        return echo(message, context)

    grid = grid_over(FakeGrid(fails, {}, NODES))
    with pytest.raises(PhaseError, match="phase 'test': user 'user-5' failed: its history is on"):
        list(grid.exchange(messages_to(grid)))


def test_silence_ends_the_phase_and_tells_who_is_missing():
    class Silent(FakeGrid):
        def pull_messages(self, message_ids):
            ids = list(message_ids)
            silent = [m for m in ids if open_envelope(self.waiting[m])[0] in ("user-2", "user-3")]
            return super().pull_messages([i for i in ids if i not in silent])

    grid = grid_over(Silent(echo, {}, NODES), timeout=0.05)
    received = []
    with pytest.raises(PhaseError, match=r"run\.timeout = 0\.05 s.* 2 user\(s\), 'user-2' first"):
        for reply in grid.exchange(messages_to(grid)):
            received.append(sender(reply))
    assert received == ["user-0", "user-1"]


def test_a_slow_consumer_is_not_taken_for_silence(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(grid_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(grid_module.time, "sleep", lambda seconds: None)
    grid = grid_over(SlowGrid(echo, {}, NODES), window=2, timeout=5.0)
    received = 0
    for _ in grid.exchange(messages_to(grid)):
        clock[0] += 100
        received += 1
    assert received == len(USERS)


def test_a_message_that_flower_does_not_take_is_an_error():
    class Full(FakeGrid):
        def push_messages(self, messages):
            return []

    grid = grid_over(Full(echo, {}, NODES))
    with pytest.raises(PhaseError, match="took no message for user 'user-0'"):
        list(grid.exchange(messages_to(grid)))


def test_only_some_users_are_in_sight_with_addresses_of_their_own():
    inner = FakeGrid(echo, {}, NODES)
    grid = grid_over(inner).only(["user-7", "user-2"], "later")
    assert grid.get_node_ids() == [1, 2]
    assert grid.address("user-7") == 1
    replies = grid.send_and_receive(messages_to(grid, ["user-2", "user-7"]))
    assert [sender(reply) for reply in replies] == ["user-2", "user-7"]
    assert [reply.content["phase"]["phase"] for reply in replies] == ["later, round 1, query"] * 2


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("ValueError: Message: it broke", "it broke"),
        (
            "<class 'flwr.ClientAppException'>:<'\nException ClientAppException occurred."
            " Message: no user 'ann''>",
            "no user 'ann'",
        ),
        ("Message: two\nlines", "two\nlines"),
        ("something else", "something else"),
        ("", "unknown"),
        (None, "unknown"),
    ],
)
def test_what_a_client_raised_is_told_without_flowers_wrapping(reason, told):
    assert client_error(reason) == told


# Flower's own strategies, unmodified: user i pulls the weight towards i.


def trainer(message: Message, context) -> Message:
    user, phase = open_envelope(message)
    number = int(user.split("-")[1])
    trained.append((user, phase, dict(message.content["config"])))
    if message.metadata.message_type == "evaluate":
        metrics = MetricRecord({"num-examples": 1, "eval-loss": float(number)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)
    value = message.content["arrays"]["w"].numpy()
    arrays = ArrayRecord({"w": Array(np.full_like(value, number))})
    metrics = MetricRecord({"num-examples": number, "train-loss": 1.0})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


trained: list[tuple[str, str, dict]] = []
START = ArrayRecord({"w": Array(np.zeros(2, dtype=np.float32))})


def train(strategy, num_rounds: int = 1, **options):
    trained.clear()
    random.seed(0)
    grid = grid_over(SlowGrid(trainer, {}, NODES), window=4, **options).only(USERS, "adapt")
    return strategy.start(grid=grid, initial_arrays=START, num_rounds=num_rounds)


def weight(result) -> float:
    values = result.arrays["w"].numpy()
    assert values[0] == values[1]
    return float(values[0])


def test_fedavg_averages_over_users_by_their_examples():
    result = train(FedAvg())
    expected = sum(i * i for i in range(9)) / sum(range(9))
    assert weight(result) == pytest.approx(expected, rel=1e-6)
    users = [user for user, phase, _ in trained if phase == "adapt, round 1, train"]
    assert sorted(users) == list(USERS)
    assert result.evaluate_metrics_clientapp[1]["eval-loss"] == pytest.approx(4)
    assert {phase for _, phase, _ in trained} == {
        "adapt, round 1, train",
        "adapt, round 1, evaluate",
    }


def test_fedavg_samples_users_not_nodes():
    train(FedAvg(fraction_train=0.4, fraction_evaluate=0.0), num_rounds=2)
    for number in (1, 2):
        phase = f"adapt, round {number}, train"
        users = [user for user, p, _ in trained if p == phase]
        assert len(users) == len(set(users)) == 3


def test_fedprox_tells_each_user_the_weight_of_its_term():
    result = train(FedProx(proximal_mu=0.25, fraction_evaluate=0.0))
    assert {config["proximal-mu"] for _, _, config in trained} == {0.25}
    assert weight(result) == pytest.approx(204 / 36, rel=1e-6)


def test_fedmedian_takes_the_median_over_users():
    assert weight(train(FedMedian(fraction_evaluate=0.0))) == 4


def test_fedadam_steps_towards_the_users():
    result = train(FedAdam(fraction_evaluate=0.0), num_rounds=2)
    assert 0 < weight(result) < 204 / 36


def test_a_user_that_fails_ends_a_flower_strategy_too():
    def fails(message, context):
        return Message(Error(code=1, reason="Message: no"), reply_to=message)

    grid = grid_over(FakeGrid(fails, {}, NODES))
    with pytest.raises(PhaseError, match=r"round 1, train': user 'user-.' failed: no"):
        FedAvg().start(grid=grid, initial_arrays=START, num_rounds=1)
