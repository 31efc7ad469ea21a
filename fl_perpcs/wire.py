"""Wire formats: how tensors of floats are written into messages.

============  ===========  ==================================================================
format        bytes each   round-trip error
============  ===========  ==================================================================
float32       4            none
bfloat16      2            at most 2⁻⁸ of the value
float16       2            at most 2⁻¹¹ of the value; values over 65,504 cannot be sent
int8          1            at most 1/254 of the largest value in the row, which adds a
                           float32 scale; a row is along the last axis, of B along d_out
============  ===========  ==================================================================

Formats tell themselves apart by the arrays' types, so a reader needs no setting. Integers travel
as they are.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fl_perpcs.errors import PerPcsError

FORMATS = ("float32", "bfloat16", "float16", "int8")
SCALE = ".scale"
"""Ends the name of the scales that belong to an int8 array."""


def encode(tensors: Mapping[str, Tensor], how: str = "float32") -> dict[str, np.ndarray]:
    """Write tensors as arrays.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        Floats of any type and device are written in the format, integers as int32,
        bytes as they are.
    how : str
        One of :data:`FORMATS`.

    Returns
    -------
    dict of str to ndarray
        Under the same names; int8 adds ``<name>.scale``. NumPy has no bfloat16: its bits are
        written as uint16.

    Raises
    ------
    PerPcsError
        If a value is too large for float16.
    """
    arrays = {}
    for name, tensor in tensors.items():
        x = tensor.detach().cpu()
        if not x.is_floating_point():
            arrays[name] = (x if x.dtype == torch.uint8 else x.to(torch.int32)).numpy()
        elif how == "int8":
            arrays[name], arrays[name + SCALE] = _quantized(x.float(), row_axis(name))
        elif how == "bfloat16":
            arrays[name] = x.to(torch.bfloat16).view(torch.uint16).numpy()
        elif how == "float16":
            half = x.half()
            if half.isinf().any() and not x.isinf().any():
                raise PerPcsError(
                    f"{name} holds {float(x.abs().max()):.4g}, more than float16 can;"
                    ' set exchange.format to "bfloat16"'
                )
            arrays[name] = half.numpy()
        else:
            arrays[name] = x.float().numpy()
    return arrays


def decode(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Read tensors back, whatever format they were written in.

    Returns
    -------
    dict of str to Tensor
        float32 (int32 where integers were written), on the CPU, writable.
    """
    tensors = {}
    for name, array in arrays.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in arrays:
            continue
        x = _tensor(array)
        if x.dtype == torch.uint16:
            x = x.view(torch.bfloat16).float()
        elif x.dtype == torch.int8:
            x = x.float() * _tensor(arrays[name + SCALE])
        elif x.is_floating_point():
            x = x.float()
        tensors[name] = x
    return tensors


def row_axis(name: str) -> int:
    """Return the axis of an array that a row of int8 is along: B has few columns and many rows."""
    return -2 if name.endswith("lora_B") else -1


def encoded_bytes(shape: tuple[int, ...], how: str = "float32", axis: int = -1) -> int:
    """Return the bytes of floats of a shape in a format, without any header."""
    count = int(np.prod(shape))
    if how != "int8":
        return count * {"float32": 4, "bfloat16": 2, "float16": 2}[how]
    return count + 4 * (count // shape[axis] if count else 0)


def _tensor(array: np.ndarray) -> Tensor:
    # Copied to where torch would have it: sums depend on how memory is aligned, in the last bit.
    return torch.tensor(array)


def _quantized(x: Tensor, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest of 255 evenly spaced values around 0, and the spacing, for each row."""
    scale = x.abs().amax(dim=axis, keepdim=True) / 127
    steps = torch.where(scale > 0, x / scale, 0.0).round()
    return steps.to(torch.int8).numpy(), scale.numpy()
