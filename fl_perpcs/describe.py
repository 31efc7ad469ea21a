"""The reference of all run-config keys, written from the model itself.

``python -m fl_perpcs.describe > docs/config.md``
"""

import inspect
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from fl_perpcs.config import Config, Section


def config_reference() -> str:
    """Return the reference as Markdown: each key with its default, range and meaning."""
    lines = [
        "# Run config",
        "",
        "Every key is set with `perpcs run CONFIG key=value …`, in a TOML file, or with",
        "`flwr run . --run-config 'key=value …'`. Defaults run the embedded demo. The whole",
        "config is checked before anything starts.",
    ]
    for name, info in Config.model_fields.items():
        section = info.annotation
        if not (inspect.isclass(section) and issubclass(section, Section)):
            lines += _table([(name, info)])
            continue
        lines += ["", f"## {name}", "", _first_line(section)]
        # A subclass may list inherited keys first; the model's own order is the order here.
        lines += _table((f"{name}.{f.alias}", f) for f in section.model_fields.values())
    return "\n".join(lines) + "\n"


def _table(fields: Any) -> Iterator[str]:
    yield from ("", "| key | default | allowed | meaning |", "| --- | --- | --- | --- |")
    for key, info in fields:
        meaning = re.sub(r"``", "`", " ".join((info.description or "").split()))
        default = json.dumps(info.default)
        yield f"| `{key}` | `{default}` | {_allowed(info)} | {meaning} |"


def _allowed(info: FieldInfo) -> str:
    if typing.get_origin(info.annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(info.annotation))
    kind = getattr(info.annotation, "__name__", str(info.annotation))
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "pattern": "matches"}
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in info.metadata
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]
    return " ".join([kind, ", ".join(bounds)]).strip()


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().split("\n")[0]


if __name__ == "__main__":
    print(config_reference(), end="")
