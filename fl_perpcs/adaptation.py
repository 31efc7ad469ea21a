"""Base LLM adaptation: base users train one task adapter, by any Flower strategy."""

import importlib
import inspect
import random
from typing import Any

from flwr.serverapp.strategy import Strategy

from fl_perpcs.config import Config
from fl_perpcs.errors import PerPcsError
from fl_perpcs.grid import UserGrid
from fl_perpcs.lm import initial_adapter, load_adaptation
from fl_perpcs.messages import pack_adapter, unpack_adapter
from fl_perpcs.pieces import Adapter
from fl_perpcs.pool import PoolSpec
from fl_perpcs.seeds import derive_seed


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
    # Flower's strategies sample nodes with the global generator.
    random.seed(derive_seed(config.seed, "adaptation"))
    start = initial_adapter(spec.shapes, spec.rank, config.seed)
    result = strategy.start(
        grid=grid,
        initial_arrays=pack_adapter(start),
        num_rounds=config.adaptation.rounds,
        timeout=config.run.timeout,
    )
    if not result.arrays:
        raise PerPcsError(f"{config.adaptation.strategy} returned no adapter; try another one")
    return unpack_adapter(result.arrays)


def import_name(key: str, path: str) -> Any:
    """Return what ``package.module:name`` names.

    Raises
    ------
    PerPcsError
        If it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PerPcsError(
            f"{key} = {path!r} cannot be imported ({error});"
            ' expected "package.module:name" of something installed, or in the folder of the run'
        ) from None


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
