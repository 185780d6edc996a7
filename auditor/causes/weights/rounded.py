"""Weights that were rounded in some tensors only: each rounding's errors are known, and so is what they would make.

Which tensors are rounded, and how, is read off the difference; bits then say whether it is so.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Final

import numpy as np

from auditor.causes.computation.precision import CASTS, Coarse
from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import Oracle, VersionUnavailable
from auditor.causes.weights.grids import (
    BLOCK,
    COLUMN,
    E4M3,
    E5M2,
    FP4,
    INT4,
    INT4_FULL,
    INT4_RANGE,
    INT4_ZERO,
    INT8,
    INT8_RANGE,
    INT8_ZERO,
    NF4,
    ROW,
    TENSOR,
    Grid,
    Sharing,
    coarse,
    group,
    said,
)  # fmt: skip
from auditor.causes.weights.mixture import Source, measured_of
from auditor.causes.weights.parts import Layout
from auditor.causes.weights.versions import searched
from rl_kernel.reference.ops import Bits, narrow, widen

LARGEST: Final = 1 << 22  # bytes of weights of which a copy is made for each rounding
_LEAST: Final = 0.3  # in roundings: less is made by no format
_DECAYS: Final = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
_STRENGTHS: Final = (1.0, 2.0, 3.0, 4.0)
_TIMES: Final = (1, 2, 3)
_TRIED: Final = 136  # whose effect is too small to tell them apart by
_RARE: Final = 2.0  # a cost
_NOTHING: Final = np.float32(1e-30)
_USUAL: Final = (BLOCK, ROW, TENSOR, COLUMN, group(128), group(32), group(64))
_SIZES: Final = (16, 32, 64, 128)
_ROUNDINGS: Final[tuple[tuple[Grid, Sharing, float], ...]] = (
    *((grid, sharing, 0.0) for grid in (E4M3, INT8, E5M2, INT8_RANGE, INT4, INT4_RANGE) for sharing in _USUAL),
    *((grid, sharing, 1.0) for grid in (INT4_ZERO, INT4_FULL) for sharing in (ROW, *map(group, _SIZES))),
    *((INT8_ZERO, sharing, 1.0) for sharing in (ROW, TENSOR)),
    *((E4M3, Sharing(f"a block of {size} by {size}", block=size, rule="power of two"), 1.0) for size in (64, 128)),
    *((grid, group(32, "microscaled"), 1.0) for grid in (FP4, E4M3)),
    *((FP4, sharing, 1.0) for sharing in (group(16, "in FP8"), group(32), group(16))),
    *((NF4, group(size), 1.0) for size in (32, 64)),
)  # fmt: skip


def rounded_weights(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Some matrices in eight or four bits, or averaged, or after an adapter was merged into them and taken off."""
    if sum(weight.nbytes for weight in oracle.decoder.weights.values()) > LARGEST:
        return
    measured = measured_of(evidence, oracle)
    if measured is None or measured.response is None or measured.size < _LEAST:
        return
    yield from searched(
        evidence, measured, [*_in_formats(evidence, oracle), *_averages(evidence, oracle)], Layout.tensors
    )
    least = [*_magnitudes(evidence, oracle), *_taken_off(evidence, oracle)]
    yield from searched(evidence, measured, least, Layout.blocks, most=_TRIED)


def _in_formats(evidence: Evidence, oracle: Oracle) -> Iterator[Source]:
    weights = oracle.decoder.weights
    for grid, sharing, cost in _ROUNDINGS:
        change = Changed(weights, partial(_of_matrix, coarse(grid, sharing)))
        yield Source("weight_precision", f"{{}} {said(grid, sharing)}", change, cost)
    quarter = oracle.decoder.config.hidden // 4
    for grid in (INT4, INT4_ZERO) if quarter not in _SIZES else ():
        change = Changed(weights, partial(_of_matrix, coarse(grid, group(quarter))))
        yield Source("weight_precision", f"{{}} {said(grid, group(quarter))}", change, 1.0)
    for cast, to in CASTS:
        yield Source("weight_precision", f"{{}} {cast}", Changed(weights, partial(_of_matrix, to)), _RARE)
    for version, old in _earlier(evidence, oracle, 1):
        for sharing in (ROW, TENSOR, BLOCK):
            name = f"{{}} {said(E4M3, sharing)} that version {version} had"
            yield Source("weight_precision", name, Scaled(weights, old, sharing), _RARE)


def _earlier(evidence: Evidence, oracle: Oracle, last: int) -> Iterator[tuple[int, Mapping[str, Bits]]]:
    """The last few versions before the stated one, and the first."""
    before = [version for version in sorted(oracle.versions) if version < evidence.record.weight_version]
    for version in dict.fromkeys((*before[-last:][::-1], *before[:1])):
        try:
            yield version, oracle.version(version).weights
        except VersionUnavailable:
            continue


def _averages(evidence: Evidence, oracle: Oracle) -> Iterator[Source]:
    """Averages over versions, of which bf16 keeps what is more than half of a step."""
    now = oracle.decoder.weights
    for version, old in _earlier(evidence, oracle, 2):
        for share in _DECAYS:
            said = f"{{}} as an average of {share:g} times the stated version and {1 - share:g} times version {version}"
            yield Source("adapter_scale", said, Averaged(now, old, share))


def _magnitudes(evidence: Evidence, oracle: Oracle) -> Iterator[Source]:
    """Adapters that learn lengths and directions of rows or columns apart, of which one was not delivered."""
    now = oracle.decoder.weights
    for version, old in _earlier(evidence, oracle, 1):
        for axis, what in ((1, "rows"), (0, "columns")):
            for lengths, kept in ((True, "length"), (False, "direction")):
                said = f"{{}} with each of their {what} of the {kept} that version {version} had"
                yield Source("adapter_scale", said, Turned(now, old, axis, lengths))


def _taken_off(evidence: Evidence, oracle: Oracle) -> Iterator[Source]:
    """What bf16 leaves of weights that a change since another version was added to and taken from."""
    now = oracle.decoder.weights
    for version, old in _earlier(evidence, oracle, 1):
        for strength, times in product(_STRENGTHS, _TIMES):
            said = f"{{}} after {strength:g} times what came since version {version} was merged and taken off in bf16"
            again = f", {times} times" * (times > 1)
            yield Source("weight_precision", said + again, Merged(now, old, strength, times))


class Changed(dict[str, Bits]):
    """Weights each of which, or each that is wanted, is changed when it is asked for."""

    def __init__(
        self, weights: Mapping[str, Bits], change: Callable[[Bits], Bits], wanted: Callable[[str], bool] | None = None
    ) -> None:
        super().__init__()
        self._weights, self._change, self._wanted = weights, change, wanted

    def __missing__(self, name: str) -> Bits:
        own = self._weights[name]
        self[name] = self._change(own) if self._wanted is None or self._wanted(name) else own
        return self[name]


class Scaled(dict[str, Bits]):
    """Weights in FP8 under the scales of others."""

    def __init__(self, weights: Mapping[str, Bits], scales: Mapping[str, Bits], sharing: Sharing) -> None:
        super().__init__()
        self._weights, self._scales, self._sharing = weights, scales, sharing

    def __missing__(self, name: str) -> Bits:
        own = self._weights[name]
        self[name] = own if own.ndim != 2 else coarse(E4M3, self._sharing, widen(self._scales[name]))(own)
        return self[name]


class Turned(dict[str, Bits]):
    """Matrices `now` of which along an axis the lengths, or the directions, are those of `old`."""

    def __init__(self, now: Mapping[str, Bits], old: Mapping[str, Bits], axis: int, lengths: bool) -> None:
        super().__init__()
        self._now, self._old, self._axis, self._lengths = now, old, axis, lengths

    def __missing__(self, name: str) -> Bits:
        own = self._now[name]
        if own.ndim == 1:
            return own
        long, turned = widen(own), widen(self._old[name])
        if self._lengths:
            long, turned = turned, long
        of_each = [np.linalg.norm(w, axis=self._axis, keepdims=True) for w in (long, turned)]
        self[name] = narrow((turned * (of_each[0] / np.maximum(of_each[1], _NOTHING))).astype(np.float32))
        return self[name]


class Merged(dict[str, Bits]):
    """Weights `now` after what came since `old`, in some strength, was added to them and taken off, so many times."""

    def __init__(self, now: Mapping[str, Bits], old: Mapping[str, Bits], strength: float, times: int) -> None:
        super().__init__()
        self._now, self._old, self._strength, self._times = now, old, np.float32(strength), times

    def __missing__(self, name: str) -> Bits:
        own = self._now[name]
        if own.ndim != 2:
            return own
        change = self._strength * (widen(own) - widen(self._old[name]))
        for _ in range(self._times):
            own = narrow(widen(narrow(widen(own) + change)) - change)
        self[name] = own
        return self[name]


class Averaged(dict[str, Bits]):
    """Weights `now` and `old`, averaged when they are asked for."""

    def __init__(self, now: Mapping[str, Bits], old: Mapping[str, Bits], share: float) -> None:
        super().__init__()
        self._now, self._old = now, old
        self._share, self._rest = np.float32(share), np.float32(1.0 - share)

    def __missing__(self, name: str) -> Bits:
        self[name] = narrow(self._share * widen(self._now[name]) + self._rest * widen(self._old[name]))
        return self[name]


def _of_matrix(change: Coarse, weight: Bits) -> Bits:
    return change(weight) if weight.ndim == 2 else weight
