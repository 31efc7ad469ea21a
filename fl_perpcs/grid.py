"""A Flower grid whose nodes are users.

A node hosts any number of users, but strategies think in users. :class:`UserGrid` stands
between: to a strategy each user is a node, so that an unmodified Flower strategy samples and
averages users; to Flower each message goes to the node that hosts the user. It sends with a
bounded number of messages under way and hands replies back in the order in which the messages
were given, so that sums do not depend on who was faster.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun

from fl_perpcs.errors import PerPcsError
from fl_perpcs.messages import ENVELOPE, WORKER, envelope, numbers_of

POLL_SECONDS = 0.05


class PhaseError(PerPcsError):
    """A phase that cannot go on: a user failed, or nobody answers."""


@dataclass
class UserGrid(Grid):
    """Users as the nodes of a federation.

    Attributes
    ----------
    inner : Grid
        Flower's grid.
    hosts : dict of str to int
        The node that hosts each user.
    users : sequence of str
        The users in sight; a strategy sees no others.
    phase : str
        Goes into each message: clients seed by it.
    window : int
        Messages under way at once.
    timeout : float
        Seconds without any reply after which a phase fails.
    attached, later : mapping of str to record
        Go into messages that have nothing under the same key: the first until a user has answered
        one, then the second.
    action : str
        Which handler of the ClientApp answers the messages of Flower's own strategies, which
        are plain ``train`` and ``evaluate``.
    progress : callable
        Called with (phase, users done, users in all).
    record : callable
        Called with (phase, user, metrics, worker) for each reply, in the order of sending.
    """

    inner: Grid
    hosts: Mapping[str, int]
    users: Sequence[str]
    phase: str = ""
    window: int = 16
    timeout: float = 3600.0
    attached: Mapping[str, Any] = field(default_factory=dict)
    later: Mapping[str, Any] = field(default_factory=dict)
    action: str = ""
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None
    record: Callable[[str, str, dict[str, Any], dict[str, Any]], None] = lambda *facts: None
    _holders: set[str] = field(default_factory=set)

    def only(self, users: Sequence[str], phase: str) -> "UserGrid":
        """Return the same grid with other users in sight, for another phase."""
        return replace(self, users=tuple(users), phase=phase)

    def address(self, user: str) -> int:
        """Return a user's node id in this grid: its place among the users, from 1."""
        return self.users.index(user) + 1

    def exchange(self, messages: Iterable[Message], total: int | None = None) -> Iterator[Message]:
        """Send messages and yield their replies, in the same order.

        At most ``window`` messages are under way or waiting to be yielded, so memory does
        not grow with their number if they are made lazily.

        Parameters
        ----------
        messages : iterable of Message
            To addresses of this grid.
        total : int, optional
            How many there are, for the progress; by default one for each user.

        Yields
        ------
        Message
            A reply without error, stamped with its user.

        Raises
        ------
        PhaseError
            If a client fails, or no reply comes within ``timeout`` seconds.
        """
        queue = iter(messages)
        order: deque[str] = deque()
        asked: dict[str, str] = {}
        replies: dict[str, Message] = {}
        carriers: set[str] = set()
        total = len(self.users) if total is None else total
        done, last_news, exhausted = 0, time.monotonic(), False
        self.progress(self.phase, done, total)
        while True:
            while not exhausted and len(order) < self.window:
                message = next(queue, None)
                if message is None:
                    exhausted = True
                    break
                user = self.users[message.metadata.dst_node_id - 1]
                identity = self._send(message, user)
                order.append(identity)
                asked[identity] = user
                if self.attached and not self.attached.keys() & message.content.keys():
                    carriers.add(identity)
            if not order:
                return
            waiting = [identity for identity in order if identity not in replies]
            for reply in self.inner.pull_messages(waiting):
                identity = reply.metadata.reply_to_message_id
                if identity not in asked or identity in replies:
                    continue
                replies[identity] = self._checked(reply, asked[identity])
                done, last_news = done + 1, time.monotonic()
                self.progress(self.phase, done, total)
            while order and order[0] in replies:
                identity = order.popleft()
                user, reply = asked.pop(identity), replies.pop(identity)
                facts = (numbers_of(reply, key) for key in ("metrics", WORKER))
                self.record(self.phase, user, *facts)
                if identity in carriers:
                    self._holders.add(user)
                yield reply
                last_news = time.monotonic()
            if order and order[0] not in replies:
                self._check_time(last_news, [asked[i] for i in order if i not in replies])
                time.sleep(POLL_SECONDS)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages and return all replies; what Flower's own strategies call.

        ``timeout`` is ignored: it would count the time that users wait for a worker.
        """
        messages = list(messages)
        if not messages:
            return []
        config = messages[0].content.config_records.get("config", ConfigRecord())
        action = messages[0].metadata.message_type.split(".")[0]
        phase = f"{self.phase}, round {config.get('server-round', 1)!s}, {action}"
        return list(replace(self, phase=phase).exchange(messages, total=len(messages)))

    def get_node_ids(self) -> list[int]:
        """Return the addresses of the users in sight."""
        return list(range(1, len(self.users) + 1))

    def set_run(self, run: FlowerRun) -> None:
        """Pass on to Flower's grid."""
        self.inner.set_run(run)

    @property
    def run(self) -> FlowerRun:
        """The Flower run."""
        return self.inner.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message; deprecated in Flower."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages to users and return their ids."""
        return [self._send(m, self.users[m.metadata.dst_node_id - 1]) for m in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pass on to Flower's grid."""
        return self.inner.pull_messages(message_ids)

    def _send(self, message: Message, user: str) -> str:
        attached = self.later if user in self._holders else self.attached
        content = {**attached, **message.content, ENVELOPE: envelope(user, self.phase)}
        kind = message.metadata.message_type
        sent = Message(
            RecordDict(content),
            self.hosts[user],
            f"{kind}.{self.action}" if self.action and "." not in kind else kind,
            ttl=message.metadata.ttl,
            group_id=message.metadata.group_id,
        )
        ids = list(self.inner.push_messages([sent]))
        if not ids or not ids[0]:  # Flower has None for a message that it refused
            raise PhaseError(f"phase {self.phase!r}: Flower took no message for user {user!r}")
        return ids[0]

    def _checked(self, reply: Message, user: str) -> Message:
        if reply.has_error():
            raise PhaseError(
                f"phase {self.phase!r}: user {user!r} failed: {client_error(reply.error.reason)}"
            )
        reply.content[ENVELOPE] = ConfigRecord({"user": user})
        return reply

    def _check_time(self, last_news: float, waiting: list[str]) -> None:
        if time.monotonic() - last_news > self.timeout:
            raise PhaseError(
                f"phase {self.phase!r}: no reply for run.timeout = {self.timeout:g} s; still"
                f" waiting for {len(waiting)} user(s), {waiting[0]!r} first. Raise run.timeout"
                " if they are slow, else look into flower.log"
            )


def client_error(text: str | None) -> str:
    """Return what a client raised, without Flower's wrapping."""
    match = re.search(r"Message: (.*?)(?:'>)?$", text or "unknown", flags=re.DOTALL)
    return (match.group(1) if match else text or "unknown").strip()
