"""Filters that keep other tokens than the likeliest: typical ones, all but the likeliest; and sets of no filter.

Where every value is too high, found − truth is −ln(mass kept). Whatever a filter's limit is, it keeps the first tokens
of some order and the drawn one; where the kept mass is that of no first tokens of any order, it was a list.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import HINT, STRONG, Evidence, Suggestion
from auditor.causes.oracle import F64, Oracle

_TOLERANCE: Final = 2e-4  # of a logarithm of a mass
_WORK: Final = 1 << 20  # probabilities that are looked at
_ROWS: Final = 64
_LEAST: Final = 8
_MOSTLY: Final = 0.9
_SELDOM: Final = 0.5
_RANKS: Final = (2, 4, 8)
_TILE: Final = 64
_SHARP: Final = 10.0  # times the tolerance: what one token more changes


def other_filters(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The order whose first tokens were kept at each row, or that there is none."""
    window, vocab = oracle.window, oracle.decoder.config.vocab
    found, truth = (values[window].astype(np.float64) for values in (evidence.found, evidence.truth))
    wrong = evidence.differs[window] & np.isfinite(found) & (np.abs(found - truth) > _TOLERANCE)
    rows = np.flatnonzero(wrong)[: max(_LEAST, min(_ROWS, _WORK // vocab))]
    lifts = found[rows] - truth[rows]
    if rows.size < _LEAST or lifts.min() < 0 or found[rows].max() > _TOLERANCE:
        return  # above 0 nothing is a probability's
    if (found[rows] > -_TOLERANCE).mean() > _SELDOM:
        return
    p = np.exp(oracle.every_token(rows).astype(np.float64)[:, :vocab])
    own = p[np.arange(rows.size), oracle.targets[rows]].copy()
    surprise = -np.log(np.maximum(p, 1e-300))
    typical = np.abs(surprise - (p * surprise).sum(axis=1, keepdims=True))
    p[np.arange(rows.size), oracle.targets[rows]] = 0.0
    orders = {
        "the likeliest": surprise,
        "those whose chance is nearest to what the entropy says": typical,
        "the unlikeliest, without the likeliest": -surprise,
        **{f"the likeliest of each of {ranks} ranks": _within(surprise, ranks) for ranks in _RANKS},
    }
    sharp, partly = 0, False
    for which, measure in orders.items():
        fits, step = _first_of(np.take_along_axis(p, np.argsort(measure, axis=1, kind="stable"), axis=1), own, lifts)
        sharp += bool(np.median(step) > _SHARP * _TOLERANCE)
        if which == "the likeliest":
            partly = fits.mean() >= _SELDOM
            if fits.mean() >= _MOSTLY or not sharp:
                return  # another's
        if fits.mean() >= _MOSTLY and np.median(step) > _SHARP * _TOLERANCE:
            yield Suggestion(
                "truncated_sampling",
                STRONG * float(fits.mean()),
                f"at {int(fits.sum())} of {rows.size} tokens the probability is divided by the mass of some tokens,"
                f" {which}",
            )
            return
    if partly:
        return
    yield Suggestion(
        "logit_processor",
        HINT + 0.07,
        f"all values are too high, by {lifts.min():.3g} to {lifts.max():.3g}, and the mass that was kept is not that of"
        " the likeliest tokens, as where some tokens are not allowed",
    )


def _within(surprise: F64, ranks: int) -> F64:
    """Which place a token has among those of its rank, the likeliest first."""
    size = -(-surprise.shape[1] // (_TILE * ranks)) * _TILE
    parts = [surprise[:, first : first + size] for first in range(0, surprise.shape[1], size)]
    places: F64 = np.concatenate([np.argsort(np.argsort(part, axis=1), axis=1) for part in parts], axis=1)
    return places.astype(np.float64)


def _first_of(p: F64, own: F64, lifts: F64) -> tuple[np.ndarray, F64]:
    """Whether some first tokens of each row, and the drawn one, have the kept mass; and what one more would change."""
    kept = np.concatenate([own[:, None], own[:, None] + np.cumsum(p, axis=1)], axis=1)
    wanted, every = np.exp(-lifts), np.arange(len(p))
    at = np.array([np.searchsorted(row, mass) for row, mass in zip(kept, wanted, strict=True)])
    low, high = (np.clip(index, 0, kept.shape[1] - 1) for index in (at - 1, at))
    left = np.minimum(*(np.abs(np.log(kept[every, index] / wanted)) for index in (low, high)))
    return left < _TOLERANCE, np.log(kept[every, np.minimum(high + 1, kept.shape[1] - 1)] / kept[every, low])
