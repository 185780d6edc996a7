"""Top-k, top-p or min-p on one side: its probabilities are divided by the mass that was kept.

found − truth is then −ln(mass kept) at every token, and the mass is the sum of the k largest probabilities for some k.
Over the tokens, those k say which filter it was: the same k everywhere, one p between Σ of k−1 and Σ of k, or one
threshold below the largest probability.
"""

from collections.abc import Iterator

import numpy as np

from auditor.causes.evidence import STRONG, Evidence, Suggestion
from auditor.causes.oracle import F64, Oracle

_TOLERANCE = 2e-4  # of a logarithm of a mass: fp32 noise of both sides, far below the step from one k to the next
_ROWS = 64


def truncation(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Whether one filter explains every token."""
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    usable = active & np.isfinite(found) & np.isfinite(truth)
    lifts = found.astype(np.float64) - truth
    # A filter may hold for a part only; where it keeps all there is nothing to see.
    rows = np.flatnonzero(usable & (np.abs(lifts) > _TOLERANCE))[:_ROWS]
    lifted = lifts[rows]
    if rows.size < 4 or lifted.min() < -_TOLERANCE:
        return
    descending = _descending(oracle, rows, oracle.temperature)
    mass = np.cumsum(descending, axis=1)
    kept = np.array([_count(row, m) for row, m in zip(mass, np.exp(-np.maximum(lifted, 0.0)), strict=True)])
    fits = np.abs(np.log(mass[np.arange(rows.size), kept - 1]) + lifted) < _TOLERANCE
    if fits.mean() < 0.9:
        return
    name = ""
    for heat in dict.fromkeys((oracle.temperature, 1.0)):
        # Whatever the temperature, the likeliest tokens are the same ones.
        seen = descending if heat == oracle.temperature else _descending(oracle, rows, heat)
        if name := _filter(seen[fits], np.cumsum(seen[fits], axis=1), kept[fits]):
            name += f" at temperature {heat:g}" if heat != oracle.temperature else ""
            break
    if not name and _is_sharp(mass[fits], kept[fits]):
        name = "some filter, or several at once"
    if name:
        yield Suggestion(
            "truncated_sampling",
            STRONG * float(fits.mean()) + (0.05 if fits.all() else 0.0),
            f"the values are those of {name}: at {int(fits.sum())} of {rows.size} tokens the probability is divided by"
            f" the mass of the {int(kept.min())} to {int(kept.max())} likeliest tokens",
        )


def _descending(oracle: Oracle, rows: np.ndarray, heat: float) -> F64:
    """Probabilities of each row, the largest first, float64 [rows,V]."""
    z = oracle.own_logits[rows, : oracle.decoder.config.vocab].astype(np.float64) / heat
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    ordered: F64 = -np.sort(-p, axis=1)
    return ordered


def _count(mass: F64, wanted: float) -> int:
    """How many of the likeliest tokens have a mass nearest to `wanted`."""
    at = int(np.searchsorted(mass, wanted))
    candidates = [k for k in (at - 1, at) if 0 <= k < len(mass)]
    return min(candidates, key=lambda k: abs(mass[k] - wanted)) + 1


def _is_sharp(mass: F64, kept: np.ndarray) -> bool:
    """Whether one token more or less would not have fitted: among many small masses some sum always does."""
    rows = np.arange(len(kept))
    one_more = mass[rows, np.minimum(kept, mass.shape[1] - 1)]
    return bool(np.median(np.log(one_more) - np.log(mass[rows, kept - 1])) > 10 * _TOLERANCE)


def _filter(descending: F64, mass: F64, kept: np.ndarray) -> str:
    """The filter that keeps `kept` tokens of each row, or an empty string."""
    rows = np.arange(len(kept))
    if len(set(kept.tolist())) == 1:
        return f"top_k {int(kept[0])}"
    below = np.where(kept > 1, mass[rows, np.maximum(kept - 2, 0)], 0.0)
    low, high = float(below.max()), float(mass[rows, kept - 1].min())
    if low < high + _TOLERANCE:
        return f"top_p in {low:.4f}..{high:.4f}"
    beyond = np.where(kept < descending.shape[1], descending[rows, np.minimum(kept, descending.shape[1] - 1)], 0.0)
    low, high = float((beyond / descending[:, 0]).max()), float((descending[rows, kept - 1] / descending[:, 0]).min())
    return f"min_p in {low:.4f}..{high:.4f}" if low < high + _TOLERANCE else ""
