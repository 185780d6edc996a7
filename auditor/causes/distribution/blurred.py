"""A usual filter on a side that computes in other roundings, too: no limit fits to the last bit, and one fits best.

As in `truncation`, found − truth is −ln(mass kept), here but for what rounding makes of the sample anyway. What people
set is told from its kin by what it leaves, and nothing is said that leaves more than such roundings.
"""

from collections.abc import Iterator
from itertools import product
from typing import Final

import numpy as np

from auditor.causes.computation.reduction import rounding_noise
from auditor.causes.distribution.truncation import ordered_logits
from auditor.causes.evidence import HINT, STRONG, Evidence, Suggestion
from auditor.causes.oracle import F64, I64, Oracle

_EVERY: Final = 1 << 30
_TOP_K: Final = (_EVERY, 5, 10, 20, 30, 40, 50, 64, 100, 200, 500)
_ALONE: Final = 129  # values of top_k below it are all tried
_TOP_P: Final = (1.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
_MIN_P: Final = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)
_LEAST: Final = 12
_ROWS: Final = 64
_WORK: Final = 1 << 22  # probabilities that are looked at
_UPWARDS: Final = 0.5  # of the mean difference: a filter makes likelier, and roundings move both ways
_SEEN: Final = 3.0  # times rounding: differences in the median that it does not drown
_BLUR: Final = 2.0  # times rounding: what the right setting leaves in the median; forbidden tokens leave more
_LEAST_SCORE: Final = HINT + 0.1  # what is left is rounding's, whatever part of the difference that is
_TWO: Final = 1.1  # times less than one number leaves: what two of them must

_Setting = tuple[int, float, float]


def blurred_filter(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The setting of top_k with top_p, or of min_p, whose values are the side's but for roundings."""
    window, vocab = oracle.window, oracle.decoder.config.vocab
    found, truth = (values[window].astype(np.float64) for values in (evidence.found, evidence.truth))
    rows = np.flatnonzero(evidence.differs[window] & np.isfinite(found) & np.isfinite(truth) & (found <= 0.0))
    rows = rows[np.linspace(0, rows.size - 1, min(rows.size, _ROWS, max(_LEAST, _WORK // vocab))).astype(np.int64)]
    lifts = found[rows] - truth[rows]
    before = float(np.abs(lifts).mean()) if rows.size else 0.0
    if rows.size < _LEAST or lifts.mean() < _UPWARDS * before:
        return
    if oracle.noise is None:
        oracle.noise = rounding_noise(oracle)
    if np.median(np.abs(lifts)) < _SEEN * oracle.noise:
        return
    setting, left = _closest(oracle, rows, lifts)
    if np.median(np.abs(left)) > _BLUR * oracle.noise:
        return
    yield Suggestion(
        "truncated_sampling",
        max(_LEAST_SCORE, STRONG * (1.0 - float(np.abs(left).mean()) / before)),
        f"the values are those of {_said(setting)}, but for differences of {np.median(np.abs(left)):.3g} in the median,"
        f" where roundings alone make {oracle.noise:.3g}, and the filter {np.median(np.abs(lifts)):.3g}",
    )


def _closest(oracle: Oracle, rows: I64, lifts: F64) -> tuple[_Setting, F64]:
    """The setting that leaves least of the lifts [R], and what it leaves, float64 [R]."""
    z = ordered_logits(oracle, rows) / oracle.temperature
    p = np.exp(z - z[:, :1])
    p /= p.sum(axis=1, keepdims=True)
    mass = np.cumsum(p, axis=1)
    chosen = np.exp(oracle.every_token(rows)[np.arange(rows.size), oracle.targets[rows]].astype(np.float64))
    settings = [
        *((k, 1.0, 0.0) for k in range(1, _ALONE)),
        *((k, of, 0.0) for k, of in product(_TOP_K, _TOP_P)),
        *((_EVERY, 1.0, least) for least in _MIN_P),
    ]
    lefts = [lifts + np.log(_kept_mass(p, mass, chosen, setting)) for setting in settings]
    best = int(np.argmin([np.abs(left).mean() * _numbers(at) for at, left in zip(settings, lefts, strict=True)]))
    return settings[best], lefts[best]


def _numbers(setting: _Setting) -> float:
    """Two numbers fit a little better than one, whatever the side did."""
    return _TWO if setting[0] < _EVERY and setting[1] < 1.0 else 1.0


def _kept_mass(p: F64, mass: F64, chosen: F64, setting: _Setting) -> F64:
    """What a setting keeps of rows [R,V], the likeliest first, and of the drawn token, float64 [R]."""
    at = np.arange(len(p)), _count(p, mass, setting) - 1
    kept, last = mass[at], p[at]
    total: F64 = np.minimum(np.where(chosen < last, kept + chosen, kept), 1.0)
    return total


def _count(p: F64, mass: F64, setting: _Setting) -> I64:
    """How many of the likeliest tokens stay in rows [R,V], int64 [R]: top_p is taken of what top_k left."""
    top_k, top_p, min_p = setting
    first = min(top_k, p.shape[1])
    whole = mass[:, first - 1 : first]
    within = (mass - p < top_p * whole) & (p >= min_p * p[:, :1])
    count: I64 = np.maximum(np.minimum(within.sum(axis=1), first), 1)
    return count


def _said(setting: _Setting) -> str:
    top_k, top_p, min_p = setting
    parts = [f"top_k {top_k}"] if top_k < _EVERY else []
    parts += [f"top_p {top_p:g}"] if top_p < 1.0 else []
    return " and ".join([*parts, *([f"min_p {min_p:g}"] if min_p else [])]) or "no filter"
