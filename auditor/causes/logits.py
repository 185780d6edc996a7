"""Logits that something touched before the softmax: a token masked or favoured, padding counted, a cap, a penalty.

Where the drawn token's own logit is untouched, found − truth = lse(truth) − lse(found), so at every row
e^(truth − found) − 1 is the mass that was added to the softmax, as a share of what was there. For one token whose logit
moved by b that share is (e^b − 1)·p(token), with one b for all rows; for padding of constant logits it is K·e^(−lse).
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import STRONG, Evidence, Suggestion, bits_hit, explained, worth_saying
from auditor.causes.fit import best_fit, roundings
from auditor.causes.oracle import F32, F64, Oracle

_ROWS: Final = 128
_FITTED_ROWS: Final = 8


def logit_processor(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """One token masked or favoured, extra logits in the sum, a soft cap, or a penalty on tokens that have occurred."""
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    rows = np.flatnonzero(active & np.isfinite(found) & np.isfinite(truth))[:_ROWS]
    if rows.size < 8:
        return
    yield from _one_token(oracle, rows, found, truth)
    for name, changed in _changed(oracle, found, truth, _spread(rows)):
        predicted = oracle.from_logits(changed)
        score = explained(found, truth, predicted, active)
        if worth_saying(score):
            hit = bits_hit(found, predicted, active)
            yield Suggestion("logit_processor", score, f"the values are those of {name}; {hit}")


def _one_token(oracle: Oracle, rows: np.ndarray, found: F32, truth: F32) -> Iterator[Suggestion]:
    """Least squares of the added share on each token's probability, and on e^(−lse)."""
    added = np.expm1(np.clip(truth[rows].astype(np.float64) - found[rows], -50.0, 50.0))
    z = oracle.own_logits[rows, : oracle.decoder.config.vocab].astype(np.float64) / oracle.temperature
    top = z.max(axis=1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(z - top).sum(axis=1))
    columns = np.concatenate([np.exp(z - lse[:, None]), np.exp(-(lse - lse.min()))[:, None]], axis=1)
    power = (columns * columns).sum(axis=0)
    slope = np.where(power > 0, (columns * added[:, None]).sum(axis=0) / np.maximum(power, 1e-300), 0.0)
    left = np.abs(added[:, None] - slope[None, :] * columns).sum(axis=0) / max(float(np.abs(added).sum()), 1e-300)
    left[:-1][slope[:-1] < -1.0 - 1e-3] = 1.0  # no logit can take away more than a token's whole mass
    if slope[-1] <= 0.0:
        left[-1] = 1.0  # and padding only adds
    best = int(left.argmin())
    share = 1.0 - float(left[best])
    if share < 0.9 or not _varies(columns[:, best]):
        return
    if best == columns.shape[1] - 1:
        count = slope[best] * np.exp(lse.min())
        yield Suggestion(
            "vocabulary",
            STRONG * share,
            f"the softmax has {count:.1f} more in its sum than the vocabulary gives, as that many padding rows of"
            f" logit 0 would; it explains {share:.1%} of the difference",
        )
        return
    how = "masked" if slope[best] < -0.99 else f"moved by {np.log1p(slope[best]):+.3g}"
    yield Suggestion(
        "logit_processor",
        STRONG * share,
        f"the values are those of a softmax in which the logit of token {best} is {how}; it explains {share:.1%} of"
        " the difference",
    )


def _varies(column: F64) -> bool:
    """A share that is the same at every row explains any constant, and so names nothing."""
    return float(column.std()) > 0.05 * float(column.mean())


def _changed(oracle: Oracle, found: F32, truth: F32, rows: np.ndarray) -> Iterator[tuple[str, F32]]:
    """Logits under a cap and under a penalty, each of the size that fits best on a few rows."""
    logits, seen = oracle.own_logits, _occurred(oracle)
    before = float(np.abs(truth[rows].astype(np.float64) - found[rows]).mean())

    def capped(cap: float, at: np.ndarray | slice = slice(None)) -> F32:
        changed: F32 = (cap * np.tanh(logits[at] / cap)).astype(np.float32)
        return changed

    def penalised(penalty: float, at: np.ndarray | slice = slice(None)) -> F32:
        z = logits[at]
        punished = np.where(z > 0, z / np.float32(penalty), z * np.float32(penalty))
        changed: F32 = np.where(seen[at], punished, z).astype(np.float32)
        return changed

    for name, change, low, high in (
        ("logits softly capped at", capped, 1.0, 200.0),
        ("a repetition penalty of", penalised, 1.005, 4.0),
    ):

        def error(value: float, change: Callable[..., F32] = change) -> float:
            predicted = oracle.from_logits(change(value, rows), targets=oracle.targets[rows])
            return float(np.abs(predicted.astype(np.float64) - found[rows]).mean())

        fitted = best_fit(error, low, high, grid=16, steps=18, hopeless=0.7 * before)
        for value in roundings(fitted) if fitted is not None else []:
            if value > 0.0:
                yield f"{name} {value:g}", change(value)


def _spread(rows: np.ndarray) -> np.ndarray:
    """A few rows from all over the window."""
    return rows[np.linspace(0, len(rows) - 1, min(_FITTED_ROWS, len(rows))).astype(np.int64)]


def _occurred(oracle: Oracle) -> np.ndarray:
    """Bool [W,V]: which tokens stand at or before each row."""
    seen = np.zeros(oracle.own_logits.shape, np.bool_)
    for at, row in enumerate(oracle.rows):
        seen[at, oracle.tokens[: row + 1]] = True
    return seen
