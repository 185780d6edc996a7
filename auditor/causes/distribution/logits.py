"""Logits that something touched before the softmax: a cap, a penalty on what has occurred, tokens never drawn."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from auditor.causes.distribution.penalties import barred, penalties
from auditor.causes.evidence import IN_PART, Evidence, Suggestion
from auditor.causes.fit import best_fit, roundings
from auditor.causes.oracle import F32, Oracle
from auditor.causes.search import Candidate, nearest

_LEAST: Final = 4
_ENOUGH: Final = 8
_LEFT: Final = 1e-3  # of the difference
_FITTED_ROWS: Final = 12

Bend = Callable[[F32, float], F32]


def logit_processor(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """A cap or a curve, penalties or a bar of the size and scope that fit best on a few rows."""
    window = oracle.window
    usable = evidence.active[window] & np.isfinite(evidence.found[window]) & np.isfinite(evidence.truth[window])
    wrong = np.flatnonzero(usable & evidence.differs[window])
    if wrong.size < _LEAST:
        return
    rows = wrong[np.linspace(0, len(wrong) - 1, min(_FITTED_ROWS, len(wrong))).astype(np.int64)]
    for candidates in (_bent(evidence, oracle, rows), penalties(evidence, oracle), barred(evidence, oracle)):
        if best := nearest(evidence, oracle, candidates):
            yield best


def penalised_values(evidence: Evidence) -> Iterator[Suggestion]:
    """Values of tokens that have occurred, lowered or multiplied by themselves: the softmax came first."""
    tokens, prompt = evidence.rollout.tokens, evidence.rollout.prompt_len
    differs = evidence.differs & np.isfinite(evidence.found)
    if differs.sum() < _ENOUGH or differs.all():
        return
    for first, name in ((prompt, "the response"), (0, "prompt and response")):
        before = Counter(tokens[first:prompt].tolist())
        times = np.zeros(len(differs))
        for at, token in enumerate(tokens[prompt:].tolist()):
            times[at] = before[token]
            before[token] += 1
        seen = (times > 0) & evidence.active
        if (differs != seen).any():
            continue
        found, truth = (values[seen].astype(np.float64) for values in (evidence.found, evidence.truth))
        matrix = np.stack([truth, np.ones(truth.size), times[seen]], axis=1)
        weights = np.linalg.lstsq(matrix, found, rcond=None)[0]
        if np.abs(matrix @ weights - found).mean() < _LEFT * np.abs(found - truth).mean():
            said = f"{weights[0]:.4g} times themselves {weights[1]:+.3g} {weights[2]:+.3g} for each time"
            yield Suggestion(
                "logit_processor",
                IN_PART,
                f"the {found.size} values of tokens that have occurred in {name}, and no others, are {said}",
            )
            return


def _capped(logits: F32, cap: float) -> F32:
    capped: F32 = (cap * np.tanh(logits / cap)).astype(np.float32)
    return capped


def _smoothed(logits: F32, factor: float) -> F32:
    below = logits - logits.max(axis=1, keepdims=True)
    smoothed: F32 = (-factor * below * below).astype(np.float32)
    return smoothed


_BENDS: Final[tuple[tuple[str, Bend, tuple[float, float]], ...]] = (
    ("softly capped at", _capped, (1.0, 200.0)),
    ("below the largest squared, times", _smoothed, (0.01, 5.0)),
)


def _bent(evidence: Evidence, oracle: Oracle, rows: np.ndarray) -> Iterator[Candidate]:
    """Every logit changed by one function with one number, which a few rows say."""
    found, truth = evidence.found[oracle.window][rows], evidence.truth[oracle.window][rows]
    logits = oracle.own_logits[:, : oracle.decoder.config.vocab]
    hopeless = 0.7 * float(np.abs(truth.astype(np.float64) - found).mean())
    for name, bend, ends in _BENDS:

        def error(number: float, bend: Bend = bend) -> float:
            predicted = oracle.from_logits(bend(logits[rows], number), targets=oracle.targets[rows])
            return float(np.abs(predicted.astype(np.float64) - found).mean())

        fitted = best_fit(error, *ends, grid=16, steps=18, hopeless=hopeless)
        for value in roundings(fitted) if fitted is not None else []:
            if value > 0.0:
                yield "logit_processor", f"logits {name} {value:g}", oracle.from_logits(bend(logits, value))
