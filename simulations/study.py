"""What a study file says.

A study is methods × seeds, each a run of its own with plain ``flwr run`` semantics. The file is
TOML::

    name = "personas"
    config = "demo"                 # what all runs start from: a file in configs/, or a path
    seeds = [0, 1, 2]
    baseline = "Per-Pcs (published)"

    [common]                        # keys that differ from it in all runs
    "roles.targets" = 20

    [methods."base LLM"]            # a row of the table: its keys
    "strategy.name" = "base"

Methods that leave the adaptation's settings alone share one adaptation for each seed, and those
that leave the pool's alone share one pool.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_perpcs.config import Config, Value, load_config
from fl_perpcs.errors import PerPcsError
from fl_perpcs.preflight import absolute_paths
from fl_perpcs.runs import read_config_file

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
ADAPTATION_SECTIONS = ("seed", "lm", "data", "roles", "prompts", "lora", "adaptation")
POOL_KEYS = ("adapter", "gates", "sharers")
OWN_COUNT = "sharers.count"
"""A smaller pool is a part of a larger one, so this key alone asks for no pool of its own."""


class Study(BaseModel):
    """A study file.

    Attributes
    ----------
    name : str
        Of the study's folder.
    config : str
        A file in ``configs/`` without its ending, or a path from the study file's folder.
    seeds : list of int
    baseline : str
        The method that others are compared with, and that ablations change.
    rivals : list of str
        More methods to compare all others with.
    base, oppu : str
        The methods between which gains are told.
    common : dict of str to value
    methods : dict of str to dict
    ablations : dict of str to list
        Each a key of the run config and the values to try, one at a time, on the baseline.
    titles : dict of str to str
        What an ablation's figure calls the key.
    hubness : list of str
        Methods whose first choices are drawn.
    pareto : list of str
        Methods that are drawn against what they send; by default all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    config: str = "demo"
    seeds: Annotated[list[int], Field(min_length=1)]
    baseline: str
    rivals: list[str] = []
    base: str = "base LLM"
    oppu: str = "OPPU"
    common: dict[str, Value] = {}
    methods: Annotated[dict[str, dict[str, Value]], Field(min_length=1)]
    ablations: dict[str, list[Value]] = {}
    titles: dict[str, str] = {}
    hubness: list[str] = []
    pareto: list[str] = []

    def values(self, seed: int, method: str) -> dict[str, Value]:
        """Return the keys of one run."""
        return {**self.common, **self.all_methods[method], "seed": seed}

    @property
    def all_methods(self) -> dict[str, dict[str, Value]]:
        """The methods, and the baseline with each value of each ablation."""
        own = self.methods[self.baseline]
        tried = {
            self.ablated(key, value): {**own, key: value}
            for key, values in self.ablations.items()
            for value in values
        }
        return {**tried, **self.methods}

    def ablated(self, key: str, value: Value) -> str:
        """Return the method that is the baseline with a value of a key: itself if it has it."""
        start = {**Config().flat(), **self.common, **self.methods[self.baseline]}
        return self.baseline if start[key] == value else f"{key} = {value}"


def load_study(path: Path) -> Study:
    """Read a study file and check every one of its run configs.

    Raises
    ------
    PerPcsError
        If the file is missing or no study, or one of its runs could not be run; all problems are
        named.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        study = Study.model_validate(found)
    except FileNotFoundError:
        raise PerPcsError(f"{path} does not exist; expected a TOML study") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PerPcsError(f"{path} is not a TOML study: {error}") from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise PerPcsError(f"{path} is not a study: {problems}") from None
    for method in (study.baseline, *study.rivals, *study.hubness, *study.pareto):
        if method not in study.methods:
            raise PerPcsError(f"{path}: {method!r} is none of the methods {[*study.methods]}")
    start = read_config_file(_config_path(study.config, path.parent))
    study = study.model_copy(update={"common": absolute_paths({**start, **study.common})})
    for method in study.all_methods:
        try:
            values = study.values(study.seeds[0], method)
            if values.get("strategy.name") == "pag" and not values.get("prompts.profiles"):
                values["prompts.profiles"] = "/profiles.json"  # the study lets them be written
            load_config(values)
        except PerPcsError as error:
            raise PerPcsError(f"{path}: method {method!r}: {error}") from None
    return study


def shares_adaptation(own: Mapping[str, Value]) -> bool:
    """Tell whether a method's keys leave the adaptation as the study has it."""
    return not any(key.split(".")[0] in ADAPTATION_SECTIONS for key in own)


def shares_pool(own: Mapping[str, Value]) -> bool:
    """Tell whether a method's keys leave the pool as the study has it, or ask for part of it."""
    changes = [key for key in own if key.split(".")[0] in POOL_KEYS and key != OWN_COUNT]
    return shares_adaptation(own) and not changes


def resolved(values: Mapping[str, Value]) -> Config:
    """Return the config of a run."""
    return load_config(dict(values))


def _config_path(name: str, folder: Path) -> Path:
    named = CONFIGS / f"{name}.toml"
    return named if named.is_file() else (folder / name)
