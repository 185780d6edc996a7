"""A pair of log-probability arrays, compared by bit pattern over the active tokens.

−0 differs from +0; a NaN equals only the same NaN and is counted, never set to zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from auditor.drift import DriftSums, drift_sums, drift_sums_of_equal
from rl_kernel.compare import Difference, compare_bits, ulp_distance

Logprobs = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

# Upper edges, inclusive, of the histogram of distances in units of the last place; the last bucket is open.
ULP_EDGES: Final = (0, 1, 2, 4, 16, 256, 65_536, 16_777_216)


def first_layer(left: Sequence[str], right: Sequence[str]) -> int | None:
    """The first layer whose digests differ, their number where none does; None where they cannot be compared.

    An empty digest is unknown, and so is then where they part.
    """
    if not left or len(left) != len(right) or not (all(left) and all(right)):
        return None
    pairs = enumerate(zip(left, right, strict=True))
    return next((layer for layer, (ours, theirs) in pairs if ours != theirs), len(left))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the bits say of one pair.

    first_index: index into the response (active or not) of the first differing active token, or None.
    first_bits: the two bit patterns there. positions: response indices of all differing active tokens, int64.
    ulp_counts: tokens a bucket of `ULP_EDGES`, then the ones above; tokens with a NaN are in none.
    nonfinite_rollout, nonfinite_trainer: active tokens with a NaN or an infinity on that side.
    """

    difference: Difference
    first_index: int | None
    first_bits: tuple[int, int] | None
    positions: npt.NDArray[np.int64]
    ulp_counts: tuple[int, ...]
    ulp_sum: int
    nonfinite_rollout: int
    nonfinite_trainer: int
    drift: DriftSums


def compare_logprobs(rollout: Logprobs, trainer: Logprobs, active: Mask) -> Comparison:
    """Compare two float32 [R] where `active`, bool [R], is set."""
    if active.all():
        left, right = np.ascontiguousarray(rollout), np.ascontiguousarray(trainer)
    else:
        left, right = np.ascontiguousarray(rollout[active]), np.ascontiguousarray(trainer[active])
    if left.size and np.array_equal(left.view(np.uint32), right.view(np.uint32)):
        return _equal(left)
    difference = compare_bits(left, right)
    positions = np.flatnonzero(active)[left.view(np.uint32) != right.view(np.uint32)]
    first = int(positions[0]) if positions.size else None
    bits = None if first is None else (int(rollout.view(np.uint32)[first]), int(trainer.view(np.uint32)[first]))
    ulp_counts, ulp_sum = _ulp_histogram(left, right, difference)
    return Comparison(
        difference=difference,
        first_index=first,
        first_bits=bits,
        positions=positions,
        ulp_counts=ulp_counts,
        ulp_sum=ulp_sum,
        nonfinite_rollout=int((~np.isfinite(left)).sum()),
        nonfinite_trainer=int((~np.isfinite(right)).sum()),
        drift=drift_sums(rollout, trainer, active),
    )


def _equal(values: Logprobs) -> Comparison:
    """What `compare_logprobs` says of two sides with the same bits, which nearly all are, without computing it."""
    drift = drift_sums_of_equal(values)
    nonfinite = drift.nonfinite
    nans = int(np.isnan(values).sum()) if nonfinite else 0
    return Comparison(
        difference=Difference(
            compared=values.size,
            differing=0,
            first_index=None,
            max_abs=0.0 if nonfinite < values.size else None,
            max_ulp=0 if nans < values.size else None,
            nan_left=nans,
            nan_right=nans,
        ),
        first_index=None,
        first_bits=None,
        positions=np.empty(0, np.int64),
        ulp_counts=(values.size - nans,) + (0,) * len(ULP_EDGES),
        ulp_sum=0,
        nonfinite_rollout=nonfinite,
        nonfinite_trainer=nonfinite,
        drift=drift,
    )


def _ulp_histogram(left: Logprobs, right: Logprobs, difference: Difference) -> tuple[tuple[int, ...], int]:
    if difference.differing == 0 and difference.nan_left == 0:
        return (difference.compared,) + (0,) * len(ULP_EDGES), 0
    numbers = ~(np.isnan(left) | np.isnan(right))
    distance = ulp_distance(left[numbers], right[numbers])
    buckets = np.bincount(np.searchsorted(ULP_EDGES, distance), minlength=len(ULP_EDGES) + 1)
    return tuple(int(count) for count in buckets), int(distance.sum())
