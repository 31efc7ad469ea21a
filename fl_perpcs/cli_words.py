"""What the commands share: ``[CONFIG] [KEY=VALUE]...``, and errors as messages."""

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_perpcs.errors import PerPcsError

if TYPE_CHECKING:
    from fl_perpcs.config import Config, Value

ConfigWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A TOML run config, or the name of a file in configs/ (demo); then single keys"
        " (lm.name=tiny assembly.top-k=1).",
        show_default=False,
    ),
]


def read_words(words: list[str]) -> "dict[str, Value]":
    """Return the keys that ``[CONFIG] [KEY=VALUE]...`` set; single keys win over the file.

    Raises
    ------
    ConfigError
        Listing every word that is neither, and files that cannot be read.
    """
    from fl_perpcs.config import ConfigError, read_config_file

    values: dict[str, Value] = {}
    problems = []
    if words and "=" not in words[0]:
        values |= read_config_file(_config_file(words[0]))
        words = words[1:]
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key:
            values[key.strip()] = _scalar(text)
        else:
            problems.append(f"{word!r} is not KEY=VALUE; write for example lm.name=tiny")
    if problems:
        raise ConfigError(problems)
    return values


def _scalar(text: str) -> "Value":
    """Read a TOML scalar; anything else is a string as it stands."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, str | int | float | bool) else text


def _config_file(name: str) -> Path:
    """Find a config by path, or by bare name in the app's or this folder's ``configs``."""
    given = Path(name).expanduser()
    if given.is_file() or given.suffix == ".toml" or given.name != name:
        return given
    folders = (Path.cwd() / "configs", Path(__file__).parent.parent / "configs")
    for folder in folders:
        if (path := folder / f"{name}.toml").is_file():
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.toml")})
    from fl_perpcs.config import ConfigError

    raise ConfigError(
        [f"{name!r} is neither a file nor a config; expected a TOML file or one of {known}"]
    )


def read_config(words: list[str] | None) -> "Config":
    """Return the config that words stand for, paths in it absolute.

    Raises
    ------
    ConfigError
        As :func:`read_words`, and with every problem of the config.
    """
    from fl_perpcs.config import load_config
    from fl_perpcs.preflight import absolute_paths

    return load_config(absolute_paths(read_words(words or [])))


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Print errors that a user can put right without a traceback: exit 2, 1 or 130."""
    try:
        yield
    except PerPcsError as error:
        from fl_perpcs.config import ConfigError

        print(f"perpcs: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        print("perpcs: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
