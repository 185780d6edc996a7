"""Rotary frequencies each divided by a number of its own, as LongRoPE's lists have them: fitted to the values."""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence, correlation
from auditor.causes.fit import climbed
from auditor.causes.oracle import F64, Oracle
from auditor.causes.search import Candidate
from auditor.compare import Logprobs
from rl_kernel.reference.model import Decoder

_ROWS: Final = 32  # wrong rows on which factors are fitted
_LEAST: Final = 16
_KNOTS: Final = 4  # factors between which the others lie, at first
_OCTAVE: Final = 8  # steps of a factor of two
_STARTS: Final[tuple[tuple[int, ...], ...]] = (
    (0, 2, 5, 8),
    (0, 4, 11, 16),
    (0, 8, 16, 24),
    (0, 0, 4, 16),
    (0, 1, 1, 2),
    (4, 4, 4, 8),
)
_PERHAPS: Final = 0.9  # of the difference
_PROMISING: Final = 0.65
_ALIKE: Final = 0.3  # correlation: what is less is another response's, which anything comes nearer to
_TIMES: Final = 6
_NUDGE: Final = 0.01
_GENTLE: Final = 1e-3
_WELL: Final = 0.1  # of the difference: so little is left by roundings

Under = Callable[[F64], Decoder]


def free_factors(evidence: Evidence, oracle: Oracle, under: Under) -> Iterator[Candidate]:
    """The factors that fit best on some rows, in two digits or as they are. under: frequencies → the model."""
    window, own = oracle.window, oracle.frequencies
    rows = np.flatnonzero(evidence.differs[window] & np.isfinite(evidence.found[window]))[:_ROWS]
    found, truth = (values[window][rows].astype(np.float64) for values in (evidence.found, evidence.truth))
    if rows.size < _LEAST or correlation(found, truth) < _ALIKE:
        return
    before = float(np.abs(truth - found).mean())

    def left(logs: F64) -> F64:
        """logs: of the factors, to the base of two."""
        values: Logprobs = oracle.logprobs_of_rows(under(own / np.exp2(logs)), rows)
        return values.astype(np.float64) - found

    def error(knots: tuple[int, ...]) -> float:
        return float(np.abs(left(_between(knots, len(own)))).mean())

    best = min(_STARTS, key=error)
    if error(best) < _PERHAPS * before:
        best = climbed(best, _beside, error, _OCTAVE // 2)
    if error(best) > _PROMISING * before:
        return
    logs = _refined(left, _between(best, len(own)), _WELL * before)
    for factors in (np.round(np.exp2(logs), 2), np.exp2(logs)):
        name = ", ".join(f"{factor:.3g}" for factor in factors[:32])
        yield "rope_scaling", f"RoPE factors {name}", oracle.logprobs(under(own / factors))


def _between(knots: tuple[int, ...], count: int) -> F64:
    places = np.linspace(0, count - 1, len(knots))
    logs: F64 = np.interp(np.arange(count), places, np.array(knots) / _OCTAVE)
    return logs


def _beside(knots: tuple[int, ...], step: int) -> Iterator[tuple[int, ...]]:
    for at in range(len(knots)):
        for by in (step, -step):
            yield (*knots[:at], knots[at] + by, *knots[at + 1 :])


def _refined(left: Callable[[F64], F64], logs: F64, enough: float) -> F64:
    """By Gauss and Newton, damped until each step makes the error smaller."""
    now, gentle = left(logs), _GENTLE
    for _ in range(_TIMES):
        if np.abs(now).mean() < enough:
            break
        slopes = np.stack([(left(logs + _NUDGE * one) - now) / _NUDGE for one in np.eye(len(logs))], axis=1)
        square = slopes.T @ slopes
        for _ in range(_TIMES):
            step = np.linalg.solve(square + gentle * np.trace(square) * np.eye(len(logs)), slopes.T @ now)
            then = left(logs - step)
            if (then @ then) < (now @ now):
                logs, now, gentle = logs - step, then, gentle / 4
                break
            gentle *= 4
        else:
            break
    return logs
