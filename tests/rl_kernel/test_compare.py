"""Comparison by bit pattern: what counts as equal, and what is counted."""

import numpy as np
import pytest

from rl_kernel.compare import compare_bits
from rl_kernel.errors import ShapeError


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_nothing_compared_is_not_equal() -> None:
    assert not compare_bits(f32(), f32()).equal


def test_minus_zero_differs_from_zero_by_a_step_and_by_nothing() -> None:
    d = compare_bits(f32(0.0, 1.0), f32(-0.0, 1.0))
    assert (d.differing, d.first_index, d.max_abs, d.max_ulp, d.equal) == (1, 0, 0.0, 1, False)


def test_nan_is_counted_on_its_side_and_equals_only_its_own_bits() -> None:
    d = compare_bits(f32(np.nan, 1.0, 2.0), f32(np.nan, np.nan, 2.0))
    assert (d.nan_left, d.nan_right, d.differing, d.first_index) == (1, 2, 1, 1)
    other = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert compare_bits(f32(np.nan), other).differing == 1


@pytest.mark.parametrize(
    ("a", "b", "ulp"), [(1.0, 1.0000001, 1), (1.0, 0.99999994, 1), (1.401298464324817e-45, -1.401298464324817e-45, 3)]
)
def test_ulp_distance_crosses_binades_and_zero(a: float, b: float, ulp: int) -> None:
    assert compare_bits(f32(a), f32(b)).max_ulp == ulp


def test_infinity_is_left_out_of_the_largest_difference_but_not_of_the_count() -> None:
    d = compare_bits(f32(np.inf, 1.0), f32(1.0, 1.5))
    assert (d.differing, d.max_abs) == (2, 0.5)


def test_where_nothing_is_finite_there_is_no_largest_difference() -> None:
    nan = compare_bits(f32(np.nan, 1.0), f32(2.0, np.nan))
    assert (nan.differing, nan.max_abs, nan.max_ulp) == (2, None, None)
    assert nan.largest == "unknown, for no pair is finite"
    infinite = compare_bits(f32(np.inf), f32(-np.inf))
    assert infinite.max_abs is None
    assert infinite.max_ulp is not None
    assert infinite.max_ulp > 0
    assert compare_bits(f32(1.0), f32(1.5)).largest == "0.5"


def test_bf16_patterns_are_compared_as_bf16() -> None:
    d = compare_bits(np.array([0x3F80, 0x4000], np.uint16), np.array([0x3F81, 0x4000], np.uint16))
    assert (d.differing, d.max_ulp, d.max_abs) == (1, 1, 2.0**-7)


@pytest.mark.parametrize(("a", "b"), [(f32(1, 2), f32(1)), (f32(1), np.array([1.0]))])
def test_shapes_and_dtypes_must_agree(a: np.ndarray, b: np.ndarray) -> None:
    with pytest.raises(ShapeError, match="cannot compare float32"):
        compare_bits(a, b)
