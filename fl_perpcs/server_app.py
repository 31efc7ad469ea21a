"""The Flower ServerApp: who is here, adaptation, then the strategy of the run config."""

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from fl_perpcs.adaptation import flower_strategy, task_adapter
from fl_perpcs.config import Config, ConfigError, load_config
from fl_perpcs.data import open_source
from fl_perpcs.errors import PerPcsError
from fl_perpcs.grid import POLL_SECONDS, PhaseError, UserGrid, client_error
from fl_perpcs.ledger import Ledger, MeteredGrid
from fl_perpcs.lm import adapter_digest, site_shapes
from fl_perpcs.messages import ADAPTATION, info_of, pack_adapter
from fl_perpcs.phases import Phases, Setting, evaluation, run_phases
from fl_perpcs.pieces import save_peft
from fl_perpcs.plugins import find
from fl_perpcs.pool import PoolSpec
from fl_perpcs.references import References
from fl_perpcs.report import write_report
from fl_perpcs.results import write_results
from fl_perpcs.roles import Member, Members, assign_roles, too_few
from fl_perpcs.runs import Run, create_run
from fl_perpcs.tasks import check_task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config says."""
    config = load_config(context.run_config)
    run = create_run(config)
    run.event("run", status="started")
    try:
        run_federation(grid, config, run)
    except BaseException as error:
        run.event("run", status="failed", message=str(error) or repr(error))
        raise
    run.event("run", status="completed")


def run_federation(grid: Grid, config: Config, run: Run) -> None:
    """Run one federation from hello to report.

    Raises
    ------
    PerPcsError
        If the federation, the config and the data do not fit together, or a user fails.
    """
    task = open_source(config).task
    check_task(config, task)
    strategy = find_strategy(config.strategy.name)
    adapt_by = flower_strategy(config)
    rank, scale = config.lora.rank, config.lora.scale
    spec = PoolSpec(rank, scale * rank, site_shapes(config))
    ledger = Ledger()
    references = References(run.folder) if config.exchange.by_reference else None
    metered = MeteredGrid(grid, ledger, references)
    try:
        members = hello(metered, config.run.timeout)
        roles = assign_roles(members, config.roles, config.seed)
        if problems := too_few(config, roles):
            raise ConfigError(problems)
        user_grid = UserGrid(
            metered,
            hosts={user: member.node for user, member in members.items()},
            users=sorted(members),
            window=config.run.window or default_window(config, members),
            timeout=config.run.timeout,
            progress=run.progress,
            record=run.record,
        )
        adapter = task_adapter(config, spec, user_grid.only(roles.base, "adapt"), adapt_by)
        if adapter:
            save_peft(adapter, run.folder / "adaptation", scale=spec.scale, base=config.lm.name)
            user_grid = replace(
                user_grid,
                attached={ADAPTATION: pack_adapter(adapter)},
                later={ADAPTATION: ConfigRecord({"digest": adapter_digest(adapter)})},
            )
        setting = Setting(config, run, members, roles, spec, adapter)
        run_phases(with_references(setting, strategy), user_grid, config.seed)
    finally:
        ledger.save(run.folder)
    write_results(setting, task)
    if config.run.report:
        write_report(run.folder)


def default_window(config: Config, members: Members) -> int:
    """Return how many messages keep every worker busy: two for each.

    A node works on one message at a time, and one machine on as many as its CPUs allow.
    """
    workers = (os.cpu_count() or 1) // config.federation.client_cpus
    nodes = len({member.node for member in members.values()})
    return 2 * max(1, min(workers, nodes))


def hello(grid: Grid, timeout: float) -> Members:
    """Ask every node which users it hosts.

    Nodes may join after the ServerApp has started; each tells how many there will be, so the
    exchange goes on until that many have answered.

    Raises
    ------
    PhaseError
        If a node fails, or not all answer in time.
    PerPcsError
        If two nodes host the same user.
    """
    members: Members = {}
    asked: set[int] = set()
    expected, deadline = 1, time.monotonic() + timeout
    while len(asked) < expected:
        new = sorted(set(grid.get_node_ids()) - asked)
        messages = [Message(RecordDict(), node, "query.hello") for node in new]
        replies = list(grid.send_and_receive(messages, timeout=deadline - time.monotonic()))
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed:
            raise PhaseError(f"phase 'hello': a node failed: {client_error(failed[0])}")
        if len(replies) < len(new) or time.monotonic() > deadline:
            raise PhaseError(
                f"phase 'hello': not all of {expected} nodes answered in run.timeout ="
                f" {timeout:g} s; raise it or look into flower.log"
            )
        for reply in replies:
            info = info_of(reply)
            expected = max(expected, info["nodes"])
            for user, facts in info["users"].items():
                if user in members:
                    raise PerPcsError(f"two nodes host user {user!r}; expected one for each")
                members[user] = Member(node=reply.metadata.src_node_id, **facts)
        asked.update(new)
        if not new:
            time.sleep(POLL_SECONDS)
    return members


def with_references(setting: Setting, strategy: Callable[[Setting], Phases]) -> Phases:
    """Yield a strategy's phases, then those of the methods that it is compared with."""
    yield from strategy(setting)
    for name in setting.config.references:
        if name != setting.config.strategy.name:
            yield evaluation(setting, name)


def find_strategy(name: str) -> Callable[[Setting], Phases]:
    """Return the strategy that ``strategy.name`` names.

    Raises
    ------
    PerPcsError
        If there is none.
    """
    # Imported by name: this package knows no strategy.
    registry = importlib.import_module("strategies").REGISTRY
    strategy: Callable[[Setting], Phases] = find("strategy.name", name, registry)
    return strategy
