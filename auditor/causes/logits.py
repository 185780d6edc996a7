"""Logits that something touched before the softmax: a cap, a penalty on what has occurred, tokens never drawn."""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.fit import best_fit, roundings
from auditor.causes.oracle import F32, Oracle
from auditor.causes.search import Candidate, nearest

Rows = np.ndarray | slice
Change = Callable[[float, Rows], F32]

_LEAST: Final = 8
_FITTED_ROWS: Final = 12


def logit_processor(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """A soft cap or a penalty of the size that fits best on a few rows: some of all, or some of the wrong ones."""
    window = oracle.window
    usable = evidence.active[window] & np.isfinite(evidence.found[window]) & np.isfinite(evidence.truth[window])
    wrong = np.flatnonzero(usable & evidence.differs[window])
    if wrong.size < _LEAST:
        return
    if best := nearest(evidence, oracle, _candidates(evidence, oracle, _spread(wrong))):
        yield best


def _candidates(evidence: Evidence, oracle: Oracle, rows: np.ndarray) -> Iterator[Candidate]:
    found, truth = evidence.found[oracle.window][rows], evidence.truth[oracle.window][rows]
    before = float(np.abs(truth.astype(np.float64) - found).mean())
    for name, change, low, high in _processors(oracle):

        def error(value: float, change: Change = change) -> float:
            predicted = oracle.from_logits(change(value, rows), targets=oracle.targets[rows])
            return float(np.abs(predicted.astype(np.float64) - found).mean())

        fitted = best_fit(error, low, high, grid=16, steps=18, hopeless=0.7 * before)
        for value in roundings(fitted) if fitted is not None else []:
            if value > 0.0:
                yield "logit_processor", f"{name} {value:g}", oracle.from_logits(change(value, slice(None)))


def _processors(oracle: Oracle) -> Iterator[tuple[str, Change, float, float]]:
    """Name, what it makes of some rows' logits under a number, and between which numbers to look for that."""
    logits = oracle.own_logits

    def capped(cap: float, at: Rows) -> F32:
        changed: F32 = (cap * np.tanh(logits[at] / cap)).astype(np.float32)
        return changed

    yield "logits softly capped at", capped, 1.0, 200.0
    for since, first in (("", 0), (" on what was generated", oracle.prompt_len)):
        counts = _counts(oracle, first)

        def repeated(penalty: float, at: Rows, counts: np.ndarray = counts) -> F32:
            z = logits[at]
            punished = np.where(z > 0, z / np.float32(penalty), z * np.float32(penalty))
            changed: F32 = np.where(counts[at] > 0, punished, z).astype(np.float32)
            return changed

        def present(penalty: float, at: Rows, counts: np.ndarray = counts) -> F32:
            changed: F32 = (logits[at] - np.float32(penalty) * (counts[at] > 0)).astype(np.float32)
            return changed

        def frequent(penalty: float, at: Rows, counts: np.ndarray = counts) -> F32:
            changed: F32 = (logits[at] - np.float32(penalty) * counts[at]).astype(np.float32)
            return changed

        yield f"a repetition penalty{since} of", repeated, 1.005, 4.0
        yield f"a presence penalty{since} of", present, 0.01, 4.0
        yield f"a frequency penalty{since} of", frequent, 0.01, 4.0


def _spread(rows: np.ndarray) -> np.ndarray:
    """A few rows from all over the window."""
    return rows[np.linspace(0, len(rows) - 1, min(_FITTED_ROWS, len(rows))).astype(np.int64)]


def _counts(oracle: Oracle, first: int) -> np.ndarray:
    """float32 [W,V]: how often each token stands from `first` on, at or before each row."""
    counts = np.zeros(oracle.own_logits.shape, np.float32)
    for at, row in enumerate(oracle.rows):
        np.add.at(counts[at], oracle.tokens[first : row + 1], 1.0)
    return counts
