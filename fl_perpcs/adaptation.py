"""Base LLM adaptation: base users train one task adapter, by any Flower strategy."""

import inspect

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import Strategy

from fl_perpcs.config import Config
from fl_perpcs.errors import PerPcsError
from fl_perpcs.grid import UserGrid
from fl_perpcs.lm import initial_adapter, load_adaptation
from fl_perpcs.messages import pack_adapter, unpack_adapter
from fl_perpcs.phases import Rounds, run_rounds
from fl_perpcs.pieces import Adapter
from fl_perpcs.plugins import import_name
from fl_perpcs.pool import PoolSpec


def task_adapter(
    config: Config, spec: PoolSpec, grid: UserGrid, strategy: Strategy | None
) -> Adapter:
    """Return the task adapter that ``adaptation.mode`` asks for, empty for none.

    Parameters
    ----------
    config : Config
    spec : PoolSpec
        Sites and their shapes.
    grid : UserGrid
        With the base users in sight.
    strategy : Strategy or None
        Of :func:`flower_strategy`.

    Raises
    ------
    PerPcsError
        If the strategy returns nothing, or the adapter's folder does not fit.
    PhaseError
        If a base user fails.
    """
    if config.adaptation.mode == "load":
        return load_adaptation(config, spec.shapes)
    if strategy is None:
        return {}
    rounds = Rounds(
        "adapt",
        "",
        strategy,
        grid.users,
        pack_adapter(initial_adapter(spec.shapes, spec.rank, config.seed)),
        config.adaptation.rounds,
        ConfigRecord(),
        lambda arrays: None,
    )
    return unpack_adapter(run_rounds(rounds, grid, config.seed))


def flower_strategy(config: Config) -> Strategy | None:
    """Build the adaptation's strategy with those of our options that it takes.

    Returns
    -------
    Strategy or None
        None if ``adaptation.mode`` needs none.

    Raises
    ------
    PerPcsError
        If it cannot be imported or built, or is no Flower strategy.
    """
    if config.adaptation.mode != "federated":
        return None
    make = import_name("adaptation.strategy", config.adaptation.strategy)
    options = {
        "fraction_train": config.adaptation.fraction_train,
        "fraction_evaluate": config.adaptation.fraction_evaluate,
    }
    if config.adaptation.proximal_mu:
        options["proximal_mu"] = config.adaptation.proximal_mu
    try:
        # FedAvg's subclasses pass options on as **kwargs.
        parameters = inspect.signature(make).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        strategy = make(**{k: v for k, v in options.items() if takes_any or k in parameters})
    except (TypeError, ValueError) as error:
        raise PerPcsError(
            f"adaptation.strategy = {config.adaptation.strategy!r} cannot be built: {error}"
        ) from None
    if not isinstance(strategy, Strategy):
        raise PerPcsError(
            f"adaptation.strategy = {config.adaptation.strategy!r} is no"
            " flwr.serverapp.strategy.Strategy"
        )
    return strategy
