"""Phases: one exchange with a set of users each; a strategy is a generator of them.

As it is a generator, a phase can depend on what earlier ones collected::

    def mine(setting):
        yield Phase("share", "train.share", setting.roles.candidates, ...)
        yield evaluation(setting, "mine", action="base")
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import Strategy

from fl_perpcs.config import Config
from fl_perpcs.errors import PerPcsError
from fl_perpcs.grid import UserGrid
from fl_perpcs.messages import REPORT, info_of, sender
from fl_perpcs.pieces import Adapter
from fl_perpcs.pool import PoolSpec
from fl_perpcs.roles import Members, Roles
from fl_perpcs.runs import Run
from fl_perpcs.seeds import derive_seed

Collect = Callable[[str, Message], None]
"""Folds a user's reply in; called once for each user, in the order of ``Phase.users``."""


@dataclass(frozen=True)
class Setting:
    """What a strategy is given.

    Attributes
    ----------
    config : Config
    run : Run
        The run folder.
    members : dict of str to Member
        Everybody, with the length of their histories.
    roles : Roles
    spec : PoolSpec
        Rank, α and sites of all adapters.
    adaptation : Adapter
        The task adapter, which clients merge into their base LLM; empty for none.
    """

    config: Config
    run: Run
    members: Members
    roles: Roles
    spec: PoolSpec
    adaptation: Adapter


@dataclass(frozen=True)
class Phase:
    """One exchange with a set of users.

    Attributes
    ----------
    name : str
        Shown in the progress; clients seed by it.
    message_type : str
        Which handler of the ClientApp answers, for example ``train.share``.
    users : sequence of str
        The audience.
    collect : callable
        Called with (user, reply) for each reply, in the order of ``users``.
    content : callable, optional
        Returns the records for a user; made just before they are sent.
    """

    name: str
    message_type: str
    users: Sequence[str]
    collect: Collect
    content: Callable[[str], RecordDict] = lambda user: RecordDict()


@dataclass(frozen=True)
class Rounds:
    """Rounds of a Flower strategy, each of the users a node to it.

    Attributes
    ----------
    name : str
        Shown in the progress; clients seed by it and the round.
    action : str
        The strategy's ``train`` messages are answered by the handler ``train.<action>``.
    strategy : Strategy
        Any of ``flwr.serverapp.strategy``; what it aggregates is up to it.
    users : sequence of str
    initial : ArrayRecord
    num_rounds : int
    config : ConfigRecord
        Goes along with each message, as the strategy's train config.
    collect : callable
        Called with the arrays that the last round ended with.
    """

    name: str
    action: str
    strategy: Strategy
    users: Sequence[str]
    initial: ArrayRecord
    num_rounds: int
    config: ConfigRecord
    collect: Callable[[ArrayRecord], None]


Phases = Iterator[Phase | Rounds]
"""What a strategy is: a generator function of a :class:`Setting` that yields these."""


def run_phases(phases: Phases, grid: UserGrid, seed: int) -> None:
    """Run one phase after another; what one collects is there when the next is asked for.

    Parameters
    ----------
    phases : iterator of Phase or Rounds
    grid : UserGrid
    seed : int
        The run's seed.

    Raises
    ------
    PhaseError
        If a client fails or nobody answers.
    PerPcsError
        If a Flower strategy ends with nothing.
    """
    for phase in phases:
        view = grid.only(phase.users, phase.name)
        if isinstance(phase, Rounds):
            phase.collect(run_rounds(phase, view, seed))
            continue
        for reply in view.exchange(_messages(phase, view)):
            phase.collect(sender(reply), reply)


def run_rounds(rounds: Rounds, grid: UserGrid, seed: int) -> ArrayRecord:
    """Let a Flower strategy run and return the arrays that it ends with.

    Raises
    ------
    PhaseError
        If a client fails or nobody answers.
    PerPcsError
        If it ends with nothing.
    """
    # Flower's strategies sample nodes with the global generator.
    random.seed(derive_seed(seed, rounds.name))
    result = rounds.strategy.start(
        grid=replace(grid, action=rounds.action),
        initial_arrays=rounds.initial,
        num_rounds=rounds.num_rounds,
        train_config=rounds.config,
    )
    if not result.arrays:
        name = type(rounds.strategy).__name__
        raise PerPcsError(f"phase {rounds.name!r}: {name} returned nothing; try another strategy")
    return result.arrays


def _messages(phase: Phase, grid: UserGrid) -> Iterator[Message]:
    """Make a phase's messages, one for each user, when they are asked for."""
    for user in phase.users:
        yield Message(phase.content(user), grid.address(user), phase.message_type)


@dataclass
class Answers:
    """What an evaluation phase collects, and keeps in the run folder when all have answered."""

    method: str
    setting: Setting
    users: Sequence[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def collect(self, user: str, reply: Message) -> None:
        """Add a user's predictions."""
        info = info_of(reply, REPORT)
        rows = [
            {"user": user, "query": query, "gold": gold}
            for query, gold in zip(info["queries"], info["golds"], strict=True)
        ]
        # Empty if no answers were generated.
        for row, prediction in zip(rows, info["predictions"], strict=False):
            row["prediction"] = prediction
        self.rows += rows
        if user == self.users[-1]:
            self.setting.run.write_lines(f"predictions/{self.method}.jsonl", self.rows)


def evaluation(
    setting: Setting,
    method: str,
    content: Callable[[str], RecordDict] = lambda user: RecordDict(),
    collect: Collect = lambda user, reply: None,
    *,
    action: str = "",
    users: Sequence[str] = (),
) -> Phase:
    """Return the phase in which targets answer their queries by a method.

    Parameters
    ----------
    setting : Setting
    method : str
        The row of the result table.
    content, collect : callable, optional
        As in :class:`Phase`; predictions are collected in any case.
    action : str
        The handler ``evaluate.<action>`` answers; by default the method's name.
    users : sequence of str
        By default all targets.
    """
    users = users or setting.roles.targets
    answers = Answers(method, setting, users)

    def collect_both(user: str, reply: Message) -> None:
        answers.collect(user, reply)
        collect(user, reply)

    return Phase(f"evaluate {method}", f"evaluate.{action or method}", users, collect_both, content)
