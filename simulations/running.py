"""Run a study: methods × seeds, resumed where it stopped.

A study's folder::

    seed-0/pool/            the run whose adaptation and pool the others borrow
    seed-0/<method>/        one run each
    seed-0/profiles.json    profiles of the users, if a method is ``pag``
"""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from fl_perpcs.config import Value
from fl_perpcs.errors import PerPcsError
from fl_perpcs.launcher import launch
from fl_perpcs.profiles import write_profiles
from fl_perpcs.runs import holds_run, open_run
from simulations.study import Study, resolved, shares_adaptation, shares_pool

POOL = "pool"
WITHOUT_EFFECT = ("run", "federation")
"""Sections that no result depends on."""


def run_study(study: Study, out: Path, say: Callable[[str], None], *, show: bool = False) -> None:
    """Make every run of a study that is not finished yet.

    Parameters
    ----------
    study : Study
    out : Path
        The study's folder.
    say : callable
        Called with a line before and after each run.
    show : bool
        Show each run's own progress too.

    Raises
    ------
    PerPcsError
        If a run fails; those before it are kept, and the next call goes on with it. Or if the
        folder holds runs of other settings.
    """
    wanted = list(runs_of(study, out))
    for number, (folder, values) in enumerate(wanted, start=1):
        name = folder.relative_to(out)
        if is_done(folder, values):
            continue
        say(f"[{number}/{len(wanted)}] {name} …")
        if profiles := values.get("prompts.profiles"):
            # The profiles are written by the base LLM, which has none to read yet.
            config = resolved({**values, "strategy.name": "base", "prompts.profiles": ""})
            longest = config.lm.max_length // 4
            write_profiles(config, Path(str(profiles)), max_new_tokens=longest)
        shutil.rmtree(folder, ignore_errors=True)  # a run that was interrupted
        launch(values, show=show)


def runs_of(study: Study, out: Path) -> Iterator[tuple[Path, dict[str, Value]]]:
    """Yield the folder and keys of each run: those that are borrowed from, then by method."""
    out = out.absolute()
    for seed in study.seeds:
        pool = run_folder(out, seed, POOL)
        yield pool, {**study.common, **_quiet(pool), "seed": seed, "evaluation.references": ""}
    for method in study.all_methods:
        for seed in study.seeds:
            folder = run_folder(out, seed, method)
            yield folder, {**_borrowed(study, out, seed, method), **_quiet(folder)}


def _borrowed(study: Study, out: Path, seed: int, method: str) -> dict[str, Value]:
    """Return a method's keys, with the adaptation and pool that its own keys leave alone."""
    pool, own = run_folder(out, seed, POOL), dict(study.all_methods[method])
    if own.get("strategy.name") == "pag":
        own.setdefault("prompts.profiles", str(pool.parent / "profiles.json"))
    values = {"evaluation.references": "", **study.common, **own, "seed": seed}
    if shares_adaptation(own) and values.get("adaptation.mode", "federated") == "federated":
        values["adaptation.mode"] = "load"
        values["adaptation.adapter"] = str(pool / "adaptation")
    if shares_pool(own):
        values["sharers.pool"] = str(pool / "pool")
    return values


def run_folder(out: Path, seed: int, method: str) -> Path:
    """Return the folder of a method's run."""
    name = re.sub(r"[^a-z0-9.=]+", "-", method.lower()).strip("-")
    return out.absolute() / f"seed-{seed}" / name


def is_done(folder: Path, values: dict[str, Value]) -> bool:
    """Tell whether a folder holds this run, finished.

    Raises
    ------
    PerPcsError
        If it holds a finished run of other settings.
    """
    if not holds_run(folder) or not (folder / "results.json").is_file():
        return False
    found, wanted = open_run(folder)[1].flat(), resolved(values).flat()
    changed = [
        key
        for key in wanted
        if wanted[key] != found[key] and key.split(".")[0] not in WITHOUT_EFFECT
    ]
    if changed:
        key = changed[0]
        raise PerPcsError(
            f"{folder} holds a run with {key} = {found[key]!r}, but the study says"
            f" {wanted[key]!r}; name another folder with --out, or remove this one"
        )
    return True


def _quiet(folder: Path) -> dict[str, Value]:
    return {"run.dir": str(folder), "run.name": "study", "run.report": False}
