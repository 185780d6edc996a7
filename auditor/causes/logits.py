"""Logits that something touched before the softmax: a token masked or favoured, padding counted, a cap, a penalty.

Where the drawn token's own logit is untouched, found − truth = lse(truth) − lse(found), so at every row
e^(truth − found) − 1 is the mass that was added to the softmax, as a share of what was there. For one token whose logit
moved by b that share is (e^b − 1)·p(token), with one b for all rows; for padding of constant logits it is K·e^(−lse).
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import HINT, STRONG, Evidence, Suggestion, bits_hit, explained, worth_saying
from auditor.causes.fit import best_fit, roundings
from auditor.causes.oracle import F32, F64, Oracle

Rows = np.ndarray | slice
Change = Callable[[float, Rows], F32]

_ROWS: Final = 128
_FITTED_ROWS: Final = 8


def logit_processor(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """One token masked or favoured, extra logits in the sum, a soft cap, or a penalty on tokens that have occurred."""
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    rows = np.flatnonzero(active & np.isfinite(found) & np.isfinite(truth))[:_ROWS]
    if rows.size < 8:
        return
    wrong = rows[found[rows] != truth[rows]]
    # A processor may hold for a part only, such as the first tokens.
    yield from _one_token(oracle, wrong if wrong.size >= 8 else rows, found, truth)
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
    """Logits under a cap and under penalties, each of the size that fits best on a few rows."""
    before = float(np.abs(truth[rows].astype(np.float64) - found[rows]).mean())
    for name, change, low, high in _processors(oracle):

        def error(value: float, change: Change = change) -> float:
            predicted = oracle.from_logits(change(value, rows), targets=oracle.targets[rows])
            return float(np.abs(predicted.astype(np.float64) - found[rows]).mean())

        fitted = best_fit(error, low, high, grid=16, steps=18, hopeless=0.7 * before)
        for value in roundings(fitted) if fitted is not None else []:
            if value > 0.0:
                yield f"{name} {value:g}", change(value, slice(None))


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


def tokens_forbidden(evidence: Evidence) -> Iterator[Suggestion]:
    """Every value too high: some mass was taken out of every softmax, and no filter of the likeliest explains it."""
    delta = evidence.delta[evidence.active]
    if delta.size < 12 or (delta > 0).mean() < 0.98 or np.median(delta) < 1e-3:
        return
    yield Suggestion(
        "logit_processor",
        HINT + 0.05,
        f"all values are too high, by {delta.min():.3g} to {delta.max():.3g}, as in a softmax from which tokens of"
        f" {1 - np.exp(-delta.min()):.1%} to {1 - np.exp(-delta.max()):.1%} of the mass were left out",
    )


def _spread(rows: np.ndarray) -> np.ndarray:
    """A few rows from all over the window."""
    return rows[np.linspace(0, len(rows) - 1, min(_FITTED_ROWS, len(rows))).astype(np.int64)]


def _counts(oracle: Oracle, first: int) -> np.ndarray:
    """float32 [W,V]: how often each token stands from `first` on, at or before each row."""
    counts = np.zeros(oracle.own_logits.shape, np.float32)
    for at, row in enumerate(oracle.rows):
        np.add.at(counts[at], oracle.tokens[first : row + 1], 1.0)
    return counts
