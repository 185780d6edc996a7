"""Logits that something touched before the softmax: a cap, a penalty on what has occurred, tokens never drawn."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.fit import best_fit, roundings
from auditor.causes.oracle import F32, Oracle
from auditor.causes.penalties import barred, penalties
from auditor.causes.search import Candidate, nearest

_LEAST: Final = 4
_FITTED_ROWS: Final = 12
_CAPS: Final = (1.0, 200.0)


def logit_processor(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """A soft cap, penalties or a bar of the size and scope that fit best on a few rows."""
    window = oracle.window
    usable = evidence.active[window] & np.isfinite(evidence.found[window]) & np.isfinite(evidence.truth[window])
    wrong = np.flatnonzero(usable & evidence.differs[window])
    if wrong.size < _LEAST:
        return
    rows = wrong[np.linspace(0, len(wrong) - 1, min(_FITTED_ROWS, len(wrong))).astype(np.int64)]
    for candidates in (_capped(evidence, oracle, rows), penalties(evidence, oracle), barred(evidence, oracle)):
        if best := nearest(evidence, oracle, candidates):
            yield best


def _capped(evidence: Evidence, oracle: Oracle, rows: np.ndarray) -> Iterator[Candidate]:
    found, truth = evidence.found[oracle.window][rows], evidence.truth[oracle.window][rows]
    logits = oracle.own_logits

    def capped(cap: float, at: np.ndarray | slice) -> F32:
        changed: F32 = (cap * np.tanh(logits[at] / cap)).astype(np.float32)
        return changed

    def error(cap: float) -> float:
        predicted = oracle.from_logits(capped(cap, rows), targets=oracle.targets[rows])
        return float(np.abs(predicted.astype(np.float64) - found).mean())

    hopeless = 0.7 * float(np.abs(truth.astype(np.float64) - found).mean())
    fitted = best_fit(error, *_CAPS, grid=16, steps=18, hopeless=hopeless)
    for value in roundings(fitted) if fitted is not None else []:
        if value > 0.0:
            yield (
                "logit_processor",
                f"logits softly capped at {value:g}",
                oracle.from_logits(capped(value, slice(None))),
            )
