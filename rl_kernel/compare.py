"""Comparison by bit pattern. Used by the tests and by the auditor alike, so there is one meaning of "equal".

−0 differs from +0. A NaN equals a NaN only with the same bits; NaNs are counted, never dropped. Two empty arrays
are not equal: nothing was compared, and `Difference.equal` is False.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_kernel.errors import ShapeError

_BITS: Mapping[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


@dataclass(frozen=True, slots=True)
class Difference:
    """The outcome of one comparison.

    first_index: flat index of the first differing value, or None.
    max_abs: largest |a-b| over values where both are finite; None where there is none.
    max_ulp: largest distance in units of the last place over non-NaN values, see `ulp_distance`; None likewise.
    nan_left, nan_right: NaNs on each side.
    """

    compared: int
    differing: int
    first_index: int | None
    max_abs: float | None
    max_ulp: int | None
    nan_left: int
    nan_right: int

    @property
    def equal(self) -> bool:
        """True if something was compared and not one bit differs."""
        return self.compared > 0 and self.differing == 0

    @property
    def largest(self) -> str:
        """`max_abs` for a message: nothing finite is not a difference of 0."""
        return "unknown, for no pair is finite" if self.max_abs is None else f"{self.max_abs:.3g}"


def compare_bits(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> Difference:
    """Compare two float arrays (float16/32/64, or uint16 holding bf16 bit patterns) of one shape and dtype."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ShapeError(f"cannot compare {left.dtype}{list(left.shape)} with {right.dtype}{list(right.shape)}")
    a, b = np.ascontiguousarray(left).reshape(-1), np.ascontiguousarray(right).reshape(-1)
    bits = _BITS[a.dtype.itemsize]
    differs = a.view(bits) != b.view(bits)
    a_value, b_value = _values(a), _values(b)
    a_nan, b_nan = np.isnan(a_value), np.isnan(b_value)
    numbers = ~(a_nan | b_nan)
    finite = np.isfinite(a_value) & np.isfinite(b_value)
    return Difference(
        compared=a.size,
        differing=int(differs.sum()),
        first_index=int(differs.argmax()) if differs.any() else None,
        max_abs=float(np.abs(a_value[finite] - b_value[finite]).max()) if finite.any() else None,
        max_ulp=int(ulp_distance(a[numbers], b[numbers]).max()) if numbers.any() else None,
        nan_left=int(a_nan.sum()),
        nan_right=int(b_nan.sum()),
    )


def _values(x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def ulp_distance(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Steps between the values of two float arrays on the number line of their dtype: 0 where the bits are equal only.

    So −0 and +0 are one step apart, which is ours. NaNs count as their bits say.
    """
    distance: npt.NDArray[np.int64] = np.abs(_ordered(left) - _ordered(right))
    return distance


def _ordered(x: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    bits = x.view(_BITS[x.dtype.itemsize])
    width = x.dtype.itemsize * 8
    magnitude = (bits & bits.dtype.type((1 << (width - 1)) - 1)).astype(np.int64)
    return np.where(bits >> (width - 1) != 0, -magnitude - 1, magnitude)
