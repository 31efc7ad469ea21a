"""What can be checked before anything is started."""

import os
import shutil
import sysconfig
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fl_perpcs
from fl_perpcs.config import PATH_KEYS, Config, ConfigError, Value, load_config, role_problems
from fl_perpcs.errors import PerPcsError
from fl_perpcs.runs import default_run_dir, holds_run, taken


def check(values: Mapping[str, Value], app_dir: Path) -> Config:
    """Return the resolved config of a run that can be started from here.

    Raises
    ------
    ConfigError
        If a key, value, path or resource is not as needed.
    PerPcsError
        If the data source has too few users or its files are missing.
    """
    config = load_config(absolute_paths(values))
    if not config.run.dir:
        folder = default_run_dir(config, Path.cwd() / "runs")
        config = load_config({**config.flat(), "run.dir": str(folder)})
    problems = [
        *_folder_problems(Path(config.run.dir)),
        *_resource_problems(config),
        *_app_problems(values, app_dir),
    ]
    if problems:
        raise ConfigError(problems)
    if config.data.source != "personas":
        _check_users(config)
    return config


def absolute_paths(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values with paths made absolute: Flower runs the app in another folder."""
    resolved = dict(values)
    for key in PATH_KEYS:
        if isinstance(value := values.get(key), str) and value:
            resolved[key] = str(Path(value).expanduser().absolute())
    if isinstance(task := values.get("data.task"), str) and task.endswith(".toml"):
        resolved["data.task"] = str(Path(task).expanduser().absolute())
    for key in ("lm.name", "prompts.encoder"):
        if isinstance(name := values.get(key), str) and name:
            folder = Path(name).expanduser()
            if (folder / "config.json").is_file():
                resolved[key] = str(folder.absolute())
    return resolved


def find_app() -> Path:
    """Return the folder that holds the Flower app's ``pyproject.toml``.

    Raises
    ------
    PerPcsError
        If neither this package's checkout nor the current folder is one.
    """
    for folder in (Path(fl_perpcs.__file__).resolve().parent.parent, Path.cwd()):
        if "components" in _flower_table(folder):
            return folder
    raise PerPcsError(
        f"no Flower app here: {Path.cwd() / 'pyproject.toml'} has no"
        " [tool.flwr.app.components]; run perpcs in a checkout of fl-perpcs"
    )


def _folder_problems(folder: Path) -> list[str]:
    if holds_run(folder):
        return [taken(folder)]
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not nearest.is_dir():
        return [f"run.dir = {str(folder)!r}: {nearest} is a file; name a folder"]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [
            f"run.dir = {str(folder)!r} cannot be written: no permission in {nearest};"
            " name a folder that you can write to"
        ]
    return []


def _resource_problems(config: Config) -> list[str]:
    cpus, gpus = config.federation.client_cpus, config.federation.client_gpus
    problems = []
    if cpus > (os.cpu_count() or 1):
        problems.append(
            f"federation.client-cpus = {cpus} is more than the {os.cpu_count()} CPUs of this"
            " machine; lower it"
        )
    devices = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
    if gpus > 0 and not any(Path(device).exists() for device in devices):
        problems.append(
            f"federation.client-gpus = {gpus}, but this machine has no GPU; set it to 0"
        )
    return problems


def _app_problems(values: Mapping[str, Value], app_dir: Path) -> list[str]:
    """Flower refuses overrides of keys that the app's pyproject.toml does not declare."""
    declared = declared_keys(app_dir)
    return [
        f"{key} is not declared under [tool.flwr.app.config] in {app_dir / 'pyproject.toml'};"
        " add it there with its default"
        for key in values
        if key not in declared
    ]


def _check_users(config: Config) -> None:
    from fl_perpcs.data import open_source  # imports the data sources
    from fl_perpcs.tasks import check_task

    source = open_source(config)
    check_task(config, source.task)
    if problems := role_problems(config, len(source.user_ids())):
        raise ConfigError(problems)


def _flower_table(app_dir: Path) -> dict[str, Any]:
    try:
        with (app_dir / "pyproject.toml").open("rb") as file:
            return dict(tomllib.load(file)["tool"]["flwr"]["app"])
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return {}


def declared_keys(app_dir: Path) -> set[str]:
    """Return the run-config keys that an app's ``pyproject.toml`` declares."""
    keys = set()
    for section, value in _flower_table(app_dir).get("config", {}).items():
        keys |= {f"{section}.{key}" for key in value} if isinstance(value, dict) else {section}
    return keys


def find_commands() -> Path:
    """Return the folder of Flower's commands: this Python's, else the first on PATH."""
    folder = Path(sysconfig.get_path("scripts"))
    if (folder / "flower-superlink").exists():
        return folder
    if found := shutil.which("flower-superlink"):
        return Path(found).parent
    raise PerPcsError(
        f"flower-superlink is neither in {folder} nor on PATH;"
        " install Flower with: pip install 'flwr[simulation]'"
    )
