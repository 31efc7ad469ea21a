"""Phases: one exchange with a set of users each; a strategy is a list of them.

The list is a generator, so that a phase can depend on what earlier ones collected::

    class Mine(PhasedStrategy):
        def phases(self):
            yield Phase("share", "train.share", self.setting.roles.candidates, ...)
            yield evaluation(self.setting, "base")
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fl_perpcs.config import Config
from fl_perpcs.errors import PerPcsError
from fl_perpcs.grid import UserGrid
from fl_perpcs.messages import ADAPTATION, info_of, sender
from fl_perpcs.pool import PoolSpec
from fl_perpcs.roles import Members, Roles
from fl_perpcs.runs import Run

Collect = Callable[[str, Message], None]
"""Folds a user's reply in; called once for each user, in the order of ``Phase.users``."""


@dataclass(frozen=True)
class Setting:
    """What a strategy is built from."""

    config: Config
    run: Run
    members: Members
    roles: Roles
    spec: PoolSpec


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


class PhasedStrategy(Strategy):
    """A Flower strategy that runs one phase after another; nothing is averaged.

    ``server_round`` counts the phases. The arrays that :meth:`start` takes are the task
    adapter; every message carries them, so that clients need no memory of earlier messages.

    Parameters
    ----------
    setting : Setting
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._phase: Phase | None = None

    @abstractmethod
    def phases(self) -> Iterator[Phase]:
        """Yield the phases; what one collects is there when the next is asked for."""

    def start(  # type: ignore[override]  # rounds and their configs have no meaning here
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 0,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Any = None,
    ) -> Result:
        """Run all phases.

        Parameters
        ----------
        grid : UserGrid
        initial_arrays : ArrayRecord
            The task adapter, empty for none.

        Returns
        -------
        Result
            With the number of users that each phase heard from, by the phase's number.

        Raises
        ------
        PhaseError
            If a client fails or nobody answers.
        """
        if not isinstance(grid, UserGrid):
            raise PerPcsError(
                f"{type(self).__name__} needs a fl_perpcs.grid.UserGrid, got {type(grid).__name__}"
            )
        self.summary()
        result = Result(arrays=initial_arrays)
        config = ConfigRecord()
        for number, phase in enumerate(self.phases(), start=1):
            self._phase = phase
            view = grid.only(phase.users, phase.name)
            if phase.message_type.startswith("evaluate"):
                sent = self.configure_evaluate(number, initial_arrays, config, view)
                metrics = self.aggregate_evaluate(number, view.exchange(sent))
                if metrics is not None:
                    result.evaluate_metrics_clientapp[number] = metrics
            else:
                sent = self.configure_train(number, initial_arrays, config, view)
                _, metrics = self.aggregate_train(number, view.exchange(sent))
                if metrics is not None:
                    result.train_metrics_clientapp[number] = metrics
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the current phase's messages, one for each user, when they are asked for."""
        phase = self._current()
        assert isinstance(grid, UserGrid)
        for user in phase.users:
            content = phase.content(user)
            if arrays:
                content[ADAPTATION] = arrays
            yield Message(content, grid.address(user), phase.message_type)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the current phase's replies in, one by one."""
        phase = self._current()
        count = 0
        for count, reply in enumerate(replies, start=1):  # noqa: B007
            phase.collect(sender(reply), reply)
        return None, MetricRecord({"users": count})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the current phase's messages, as :meth:`configure_train`."""
        return self.configure_train(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Fold the current phase's replies in, as :meth:`aggregate_train`."""
        return self.aggregate_train(server_round, replies)[1]

    def summary(self) -> None:
        """Log nothing: the run folder has the resolved config."""

    def _current(self) -> Phase:
        assert self._phase is not None, "start() sets the phase"
        return self._phase


@dataclass
class Answers:
    """What an evaluation phase collects, and keeps in the run folder when all have answered."""

    method: str
    setting: Setting
    rows: list[dict[str, Any]] = field(default_factory=list)

    def collect(self, user: str, reply: Message) -> None:
        """Add a user's predictions."""
        info = info_of(reply)
        rows = [
            {"user": user, "query": query, "gold": gold}
            for query, gold in zip(info["queries"], info["golds"], strict=True)
        ]
        # Empty if no answers were generated.
        for row, prediction in zip(rows, info["predictions"], strict=False):
            row["prediction"] = prediction
        self.rows += rows
        if user == self.setting.roles.targets[-1]:
            self.setting.run.write_lines(f"predictions/{self.method}.jsonl", self.rows)


def evaluation(
    setting: Setting,
    method: str,
    content: Callable[[str], RecordDict] = lambda user: RecordDict(),
    collect: Collect = lambda user, reply: None,
) -> Phase:
    """Return the phase in which the targets answer their queries by a method.

    Parameters
    ----------
    setting : Setting
    method : str
        The action of the message, ``evaluate.<method>``, and the row of the result table.
    content, collect : callable, optional
        As in :class:`Phase`; predictions are collected in any case.
    """
    answers = Answers(method, setting)

    def collect_both(user: str, reply: Message) -> None:
        answers.collect(user, reply)
        collect(user, reply)

    return Phase(
        f"evaluate {method}", f"evaluate.{method}", setting.roles.targets, collect_both, content
    )
