"""A target's assembled adapter, out of a run folder, as a standard PEFT folder."""

from pathlib import Path

from fl_perpcs.assembly import cook
from fl_perpcs.errors import PerPcsError
from fl_perpcs.lm import model_path
from fl_perpcs.pieces import load_peft, save_peft, stack
from fl_perpcs.pool import load_pool
from fl_perpcs.runs import open_run, read_json


def export_adapter(folder: Path, user: str, out: Path) -> Path:
    """Write a target's adapter so that ``PeftModel.from_pretrained`` loads it.

    It holds the task adapter too, stacked along the rank, and so belongs on the base LLM as
    it was before adaptation: nothing else than the original model is needed.

    Parameters
    ----------
    folder : Path
        A run folder.
    user : str
        A target of that run.
    out : Path
        The PEFT folder to write; must not exist.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    PerPcsError
        If the run has no recipe for the user, its targets fine-tuned what they assembled, or its
        pool is damaged.
    """
    run, config = open_run(folder)
    if config.tuning.factors != "none":
        raise PerPcsError(
            f"{folder}: the targets fine-tuned their adapters (tuning.factors ="
            f" {config.tuning.factors!r}) and kept them; a recipe does not make them again"
        )
    recipes = read_json(run.folder / "recipes.json")
    if user not in recipes:
        known = ", ".join(sorted(recipes)) or "none"
        raise PerPcsError(f"{folder} has no recipe for user {user!r}; it has {known}")
    pool = load_pool(run.folder / "pool")
    adapter = cook(recipes[user], pool.stacks(), config.assembly.merge)
    if (run.folder / "adaptation").is_dir():
        adapter = stack(load_peft(run.folder / "adaptation")[0], adapter)
    return save_peft(adapter, out, scale=pool.spec.scale, base=model_path(config.lm.name))
