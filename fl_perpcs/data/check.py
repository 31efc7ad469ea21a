"""What a source's data is like, and whether a run could be started on it."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from fl_perpcs.config import Config, role_problems
from fl_perpcs.data import Example, Source, User, open_source
from fl_perpcs.data.leaks import LeakChecked, find_leaks, without
from fl_perpcs.errors import PerPcsError
from fl_perpcs.roles import Member, Members, Roles, assign_roles, too_few
from fl_perpcs.tasks import Task

STRANGERS = 20
"""Most outputs outside the labels that are listed one by one."""


@dataclass(frozen=True)
class Spread:
    """How a number varies: nearest-rank percentiles, all 0 where there is nothing."""

    min: int = 0
    median: int = 0
    p95: int = 0
    max: int = 0


@dataclass(frozen=True)
class LabelCount:
    """How often an output occurs."""

    label: str
    history: int
    queries: int
    known: bool


@dataclass(frozen=True)
class Check:
    """What was found; histories are counted as the run would use them.

    Attributes
    ----------
    source, task : str
    users : int
    given_roles : dict of str to int
        Users of each role that the data gives.
    left_out : int or None
        Users that the source leaves out for want of items; None where it does not tell.
    with_queries : int
        Users that have queries.
    history, queries : int
        Items of all users.
    history_per_user, queries_per_user : Spread
    input_words, output_words : Spread
        Lengths of all items, inputs of plain text aside.
    plain_text : int
        History items without an input.
    queries_without_input : int
    labels : list of LabelCount
        Of tasks with labels: every label, then the commonest other outputs.
    strange_outputs : int
        Items with an input whose output is not a label.
    duplicates : int
        History items with the input and output of an earlier one of the same user.
    shared : int
        Different items that more than one user has.
    leaks, users_with_leaks : int
        History items that give a query away, and whose they are; ``data.leaks`` says whether
        the run uses them.
    leaks_are : str
        ``data.leaks``.
    empty_histories, one_item_histories : int
        Users.
    dropped : int or None
        Items that the source drops for want of an output; None where it does not tell.
    roles : dict of str to int
        Users of each role of the config; empty if they cannot be filled.
    problems : list of str
        Why a run could not be started.
    warnings : list of str
    """

    source: str
    task: str
    users: int
    given_roles: dict[str, int]
    left_out: int | None
    with_queries: int
    history: int
    queries: int
    history_per_user: Spread
    queries_per_user: Spread
    input_words: Spread
    output_words: Spread
    plain_text: int
    queries_without_input: int
    labels: list[LabelCount]
    strange_outputs: int
    duplicates: int
    shared: int
    leaks: int
    users_with_leaks: int
    leaks_are: str
    empty_histories: int
    one_item_histories: int
    dropped: int | None
    roles: dict[str, int]
    problems: list[str]
    warnings: list[str]


Watch = Callable[[list[str]], Iterable[str]]
"""Hands user ids on, and may show how far it is."""


def check_data(config: Config, watch: Watch = iter) -> Check:
    """Open the config's source as a run would and look at every item of every user.

    One user is held at a time, and eight bytes of each item.

    Parameters
    ----------
    config : Config
    watch : callable
        Called with the ids of all users; returns them one by one.

    Raises
    ------
    PerPcsError
        If the source cannot be opened or a user cannot be read.
    """
    source = open_source(config)
    raw = source.source if isinstance(source, LeakChecked) else source
    tally = _Tally()
    members: Members = {}
    for user_id in watch(raw.user_ids()):
        user = raw.user(user_id)
        leaks = find_leaks(user, raw.task)
        history = without(user.history, leaks) if config.data.leaks == "remove" else user.history
        members[user_id] = Member(0, len(history), len(user.queries), user.group, user.role)
        tally.add(user, history, len(leaks), raw.task)
        tally.dropped += _dropped(raw, user_id)
    roles, problems = _roles(config, members)
    if tally.leaks and config.data.leaks == "stop":
        problems.append(
            f"{tally.leaks} history items of {tally.users_with_leaks} users give their queries"
            ' away; clean the data or set data.leaks = "remove"'
        )
    return _summary(config, raw, tally, members, roles, problems)


@dataclass
class _Tally:
    """What is counted while users come by."""

    input_words: Counter[int] = field(default_factory=Counter)
    output_words: Counter[int] = field(default_factory=Counter)
    history_labels: Counter[str] = field(default_factory=Counter)
    query_labels: Counter[str] = field(default_factory=Counter)
    strange_outputs: int = 0
    plain_text: int = 0
    queries_without_input: int = 0
    duplicates: int = 0
    leaks: int = 0
    users_with_leaks: int = 0
    dropped: int = 0
    digests: array = field(default_factory=lambda: array("Q"))

    def add(self, user: User, history: tuple[Example, ...], leaks: int, task: Task) -> None:
        for item in (*history, *user.queries):
            if item.input:
                self.input_words[len(item.input.split())] += 1
            self.output_words[len(item.output.split())] += 1
        if task.labels:
            self._count_labels(self.history_labels, history, task)
            self._count_labels(self.query_labels, user.queries, task)
        self.plain_text += sum(not item.input for item in history)
        self.queries_without_input += sum(not query.input for query in user.queries)
        seen = {_digest(item) for item in history}
        self.duplicates += len(history) - len(seen)
        self.digests.extend(seen | {_digest(query) for query in user.queries})
        self.leaks += leaks
        self.users_with_leaks += leaks > 0

    def _count_labels(self, counts: Counter[str], examples: Iterable[Example], task: Task) -> None:
        for example in examples:
            if not example.input:  # plain text answers nothing
                continue
            known = example.output in task.labels
            self.strange_outputs += not known
            # Free text mistaken for labels must not fill the memory.
            if known or example.output in counts or len(counts) < len(task.labels) + 1000:
                counts[example.output] += 1


def _digest(item: Example) -> int:
    # The length keeps "ab" + "c" apart from "a" + "bc".
    text = f"{len(item.input)} {item.input}{item.output}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _dropped(source: Source, user_id: str) -> int:
    tell = getattr(source, "dropped", None)
    return tell(user_id) if tell else 0


def _roles(config: Config, members: Members) -> tuple[Roles | None, list[str]]:
    """Deal the roles as the server would; return them and what stands in the way."""
    if problems := role_problems(config, len(members)):
        return None, problems
    try:
        roles = assign_roles(members, config.roles, config.seed)
    except PerPcsError as error:
        return None, [str(error)]
    problems += too_few(config, roles)
    wanted = config.sharers
    enough = sum(members[user].history >= wanted.min_history for user in roles.candidates)
    least = 1 if wanted.selection == "k-means" else wanted.count
    if not problems and not wanted.pool and enough < least:
        problems.append(
            f"{enough} of {len(roles.candidates)} candidates have sharers.min-history ="
            f" {wanted.min_history} history items, but sharers.count = {wanted.count}; lower either"
        )
    return roles, problems


def _summary(
    config: Config,
    source: Source,
    tally: _Tally,
    members: Members,
    roles: Roles | None,
    problems: list[str],
) -> Check:
    histories = Counter(member.history for member in members.values())
    queries = Counter(member.queries for member in members.values())
    sizes = (
        {"base": roles.base, "candidates": roles.candidates, "targets": roles.targets}
        if roles
        else {}
    )
    found = Check(
        source=config.data.source,
        task=source.task.name,
        users=len(members),
        given_roles=dict(Counter(m.role for m in members.values() if m.role)),
        left_out=getattr(source, "left_out", None),
        with_queries=len(members) - queries[0],
        history=sum(size * users for size, users in histories.items()),
        queries=sum(size * users for size, users in queries.items()),
        history_per_user=spread(histories),
        queries_per_user=spread(queries),
        input_words=spread(tally.input_words),
        output_words=spread(tally.output_words),
        plain_text=tally.plain_text,
        queries_without_input=tally.queries_without_input,
        labels=_label_counts(tally, source.task),
        strange_outputs=tally.strange_outputs,
        duplicates=tally.duplicates,
        shared=_repeated(tally.digests),
        leaks=tally.leaks,
        users_with_leaks=tally.users_with_leaks,
        leaks_are=config.data.leaks,
        empty_histories=histories[0],
        one_item_histories=histories[1],
        dropped=tally.dropped if hasattr(source, "dropped") else None,
        roles={name: len(users) for name, users in sizes.items()},
        problems=problems,
        warnings=[],
    )
    found.warnings.extend(_warnings(config, source.task, found, roles, members))
    return found


def spread(counts: Counter[int]) -> Spread:
    """Return how the counted numbers vary.

    Parameters
    ----------
    counts : Counter of int
        How often each number occurs.
    """
    total = sum(counts.values())
    if not total:
        return Spread()
    numbers = sorted(number for number, count in counts.items() if count)
    ranks = np.cumsum([counts[number] for number in numbers])

    def rank(share: float) -> int:
        return numbers[int(np.searchsorted(ranks, share * total))]

    return Spread(numbers[0], rank(0.5), rank(0.95), numbers[-1])


def _label_counts(tally: _Tally, task: Task) -> list[LabelCount]:
    if not task.labels:
        return []
    both = tally.history_labels + tally.query_labels
    strange = [label for label, _ in both.most_common() if label not in task.labels]
    return [
        LabelCount(label, tally.history_labels[label], tally.query_labels[label], known)
        for labels, known in ((task.labels, True), (strange[:STRANGERS], False))
        for label in labels
    ]


def _repeated(digests: array) -> int:
    """Return how many of the digests occur more than once; each user has each once."""
    _, counts = np.unique(np.frombuffer(digests, dtype=np.uint64), return_counts=True)
    return int((counts > 1).sum())


def _warnings(
    config: Config, task: Task, found: Check, roles: Roles | None, members: Members
) -> list[str]:
    """Return what a person should know before trusting a run on this data."""
    treated = {"remove": "removed", "keep": "kept", "stop": "reason to stop"}[found.leaks_are]
    cases = (
        (found.left_out, "users have too few items and are left out"),
        (found.dropped, "items have no output and are dropped"),
        (found.users - found.with_queries, "users have no queries; they cannot be targets"),
        (found.empty_histories, "users have no history; they cannot be candidates or targets"),
        (found.one_item_histories, "users have a history of one item"),
        (
            found.leaks,
            f'history items give a query away; {treated} (data.leaks = "{found.leaks_are}")',
        ),
        (found.duplicates, "history items are duplicates of an earlier one of the same user"),
        (found.shared, "items are shared between users: personalization may only look like it"),
        (found.queries_without_input, "queries have no input: nothing tells them apart"),
        (
            0 if task.text_template else found.plain_text,
            f"items are plain text, but the task {task.name!r} has no text-template for them",
        ),
        (found.strange_outputs, f"outputs are not labels of the task {task.name!r}"),
    )
    warnings = [f"{count:,} {what}" for count, what in cases if count]
    wanted = config.sharers
    if roles and not wanted.pool:
        enough = sum(members[user].history >= wanted.min_history for user in roles.candidates)
        if enough < wanted.count:
            warnings.append(
                f"{enough} of {len(roles.candidates)} candidates have sharers.min-history ="
                f" {wanted.min_history} history items: fewer sharers than sharers.count ="
                f" {wanted.count}"
            )
    return warnings
