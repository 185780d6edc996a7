"""Values that nobody computed: exact zeros, or one and the same number, where something was missing."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import LAST_BITS, SETTLED, Evidence, Suggestion

_AGAIN: Final = 3  # times that no value comes by chance
_SELDOM: Final = 0.1  # of the wrong values
_NEAR_ZERO: Final = 1e-3  # values nearer to 0 are so few in fp32 that sure rows share them by chance
_SURE: Final = 0.1  # a value so near to 0 a model that went wrong may take for 0
_WHOLE: Final = 2.0**24  # every number beyond it is whole


def filler(evidence: Evidence) -> Iterator[Suggestion]:
    """A log-probability of exactly 0 where the reference's is not near it; or one other number at several tokens.

    0 is never certain: a filter that keeps one token gives it exactly 0 too, and is then the better explanation.
    """
    zero = _zeros(evidence)
    put = zero | _others(evidence, zero) if zero.any() else _one_number(evidence)
    if not put.any():
        put = _whole(evidence)
    differing = int(evidence.differs.sum())
    if not put.any() or differing == 0:
        return
    at = np.flatnonzero(put)
    share, number = at.size / differing, float(evidence.found[at[0]])
    if at.size == 1 and share < _SELDOM:
        return  # a model that went wrong may be sure once
    last = at.size == 1 and at[0] == len(put) - 1
    yield Suggestion(
        "filler",
        SETTLED if number != 0.0 and share == 1.0 and at.size >= _AGAIN else 0.5 + 0.4 * share,
        f"exactly {number:.4g} at {at.size} of {differing} differing tokens, first at {at[0]}"
        + (" (the last token, as a forced end would have it)" if last else "")
        + f"; the reference has {evidence.truth[at[0]]:.4f} there",
    )


def _zeros(evidence: Evidence) -> np.ndarray:
    """Bool [R]: zeros that nobody computed; all that are wrong where one of them is far off and nothing else is wrong.

    Beside other wrong values, what a model that went wrong is sure of is 0, too.
    """
    zero: np.ndarray = (evidence.found == 0.0) & evidence.differs
    alone = not (evidence.differs & ~zero).any()
    far = zero & (evidence.truth < (-LAST_BITS if alone else -_SURE))
    return zero if alone and far.any() else far


def _whole(evidence: Evidence) -> np.ndarray:
    """Bool [R]: whole numbers; of those beyond what has a fraction, one that is everywhere the same."""
    finite = evidence.differs & np.isfinite(evidence.found)
    size = np.abs(evidence.found)
    beyond = finite & (size >= _WHOLE)
    if len(np.unique(evidence.found[beyond])) > 1:
        return np.zeros(len(finite), np.bool_)
    whole: np.ndarray = finite & (evidence.found == np.rint(evidence.found)) & (size >= 1.0)
    return whole


def _others(evidence: Evidence, zero: np.ndarray) -> np.ndarray:
    """Bool [R]: beside zeros, where the side has another number that it has no less often than anything by chance."""
    rest = evidence.differs & ~zero & np.isfinite(evidence.found)
    numbers, times = np.unique(evidence.found[rest], return_counts=True)
    again = numbers[(times >= _AGAIN) & (np.abs(numbers) > _NEAR_ZERO)]
    put: np.ndarray = rest & np.isin(evidence.found, again)
    return put


def _one_number(evidence: Evidence) -> np.ndarray:
    """Bool [R]: where the side has the number that is wrong most often, if it is beyond all right ones or no chance."""
    nothing = np.zeros(len(evidence.found), np.bool_)
    wrong = evidence.found[evidence.differs & np.isfinite(evidence.found)]
    if np.unique(wrong).size > 1:
        wrong = wrong[np.abs(wrong) > _NEAR_ZERO]
    numbers, times = np.unique(wrong, return_counts=True)
    if not times.size or times.max() < 2:
        return nothing
    number = numbers[times.argmax()]
    same: np.ndarray = (evidence.found == number) & evidence.differs
    right = evidence.truth[evidence.active & np.isfinite(evidence.truth)]
    said = evidence.found[evidence.active & np.isfinite(evidence.found)]
    replaced = evidence.truth[same]
    limit = ((said <= number).all() and (replaced >= number).all()) or (
        (said >= number).all() and (replaced <= number).all()
    )
    if right.min() <= number < 0.0 and (times.max() < _AGAIN or limit):
        return nothing  # a limit, or a value that comes twice
    return same
