"""Wire formats: what comes back, and how far off it is."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fl_perpcs.errors import PerPcsError
from fl_perpcs.wire import FORMATS, decode, encode, encoded_bytes

FLOATS = arrays(
    np.float32,
    array_shapes(min_dims=1, max_dims=3, max_side=6),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=False),
)
RELATIVE = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}


@settings(deadline=None)
@given(FLOATS, st.sampled_from(sorted(RELATIVE)))
def test_a_float_comes_back_as_near_as_the_format_says(x, how):
    back = decode(encode({"x": torch.from_numpy(x)}, how))["x"].numpy()
    # 2⁻²⁵: half of the smallest step of float16 below its normal numbers.
    assert back.dtype == np.float32
    assert (
        np.abs(back - x) <= RELATIVE[how] * np.abs(x) + (2**-25 if how == "float16" else 0)
    ).all()


@settings(deadline=None)
@given(FLOATS)
def test_int8_is_off_by_half_a_step_of_its_row(x):
    back = decode(encode({"x": torch.from_numpy(x)}, "int8"))["x"].numpy()
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    assert (np.abs(back - x) <= step * 0.5001).all()


@settings(deadline=None)
@given(FLOATS, st.sampled_from(FORMATS))
def test_the_bytes_are_those_that_the_formula_says(x, how):
    written = encode({"x": torch.from_numpy(x)}, how)
    assert sum(array.nbytes for array in written.values()) == encoded_bytes(x.shape, how)


def test_of_b_a_row_of_int8_is_a_column():
    B = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    written = encode({"s.lora_B": B}, "int8")
    assert written["s.lora_B.scale"].shape == (1, 2)
    assert sum(array.nbytes for array in written.values()) == encoded_bytes((50, 2), "int8", -2)
    assert torch.allclose(decode(written)["s.lora_B"], B, atol=float(B.abs().max()) / 253)


@pytest.mark.parametrize("how", FORMATS)
def test_writing_what_was_read_changes_nothing_more(how):
    x = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    once = decode(encode({"x": x}, how))
    assert torch.allclose(decode(encode(once, how))["x"], once["x"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("how", FORMATS)
def test_integers_and_empty_tensors_travel_as_they_are(how):
    given = {"n": torch.tensor([1, 2**20]), "bytes": torch.tensor([255], dtype=torch.uint8)}
    back = decode(encode({**given, "none": torch.empty(0, 4)}, how))
    assert back["n"].tolist() == [1, 2**20]
    assert back["bytes"].tolist() == [255]
    assert back["none"].shape == (0, 4)


def test_a_value_that_float16_cannot_hold_is_named():
    with pytest.raises(PerPcsError, match=r"big holds 7e\+04, more than float16.*bfloat16"):
        encode({"big": torch.tensor([70_000.0])}, "float16")


def test_zero_rows_have_no_scale():
    assert decode(encode({"x": torch.zeros(2, 3)}, "int8"))["x"].eq(0).all()
