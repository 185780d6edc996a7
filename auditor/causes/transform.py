"""Values that are a function of the right ones: another base, a sign, probabilities for logarithms, a clamp.

Or no function of them at all: those of another sample.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import HINT, IN_PART, STRONG, Evidence, Suggestion, correlation

_LEAST: Final = 12
_MORE_THAN_ROUNDING: Final = 0.01
_BASES: Final = {1 / np.log(2.0): "logarithms of base 2", 1 / np.log(10.0): "logarithms of base 10", -1.0: "negated"}


def value_transform(evidence: Evidence) -> Iterator[Suggestion]:
    """A limit that values do not pass, sums over tokens, or values in the order of the right ones and far from them."""
    found, truth = _finite(evidence)
    if found.size < _LEAST:
        return
    said = _limited(found, truth) or _summed(found, truth)
    if said:
        yield Suggestion("value_transform", STRONG, said)
        return
    if said := _shifted(found, truth):
        # Mass that a filter left out may be much the same everywhere; what is added to a probability is not.
        yield Suggestion("value_transform", IN_PART if said.endswith("probability") else STRONG, said)
        return
    if np.median(np.abs(found - truth) / np.maximum(np.abs(truth), 1e-3)) < _MORE_THAN_ROUNDING:
        return
    steps = np.diff(found[np.argsort(truth, kind="stable")])
    rising, falling = float((steps >= 0).mean()), float((steps <= 0).mean())
    if max(rising, falling) < 0.98 or len(np.unique(found)) < found.size // 3:
        return
    slope = float(found @ truth / (truth @ truth))
    straight = float(np.abs(found - slope * truth).max()) < 1e-3 * float(np.abs(found).max())
    name = next((text for factor, text in _BASES.items() if abs(slope - factor) < 1e-3 * abs(factor)), "")
    how = f"{slope:.5g} times the reference's" + (f", {name}" if name else "") if straight else "a function of them"
    yield Suggestion(
        "value_transform",
        STRONG if straight else HINT + 0.2,
        f"the {found.size} values are in the reference's order{' turned round' if falling > rising else ''}: {how}",
    )


def _limited(found: np.ndarray, truth: np.ndarray) -> str:
    """All that differ have one value, beyond which the right ones lie."""
    differs = found != truth
    if differs.sum() < 3 or differs.all():
        return ""
    limit = float(found[differs][0])
    if (found[differs] != limit).any() or limit == 0.0:
        return ""
    if (truth[differs] < limit).all() and (found >= limit).all():
        return f"no value lies below {limit:.4g}, where {int(differs.sum())} of the reference's do"
    if (truth[differs] > limit).all() and (found <= limit).all():
        return f"no value lies above {limit:.4g}, where {int(differs.sum())} of the reference's do"
    return ""


def _shifted(found: np.ndarray, truth: np.ndarray) -> str:
    """One number added to every value, or to every probability before its logarithm was taken."""
    for name, moved in (("value", found - truth), ("probability", np.exp(found) - np.exp(truth))):
        size = float(np.median(moved))
        noise = 4e-7 * (np.abs(truth) + 1.0 if name == "value" else np.exp(truth) * (np.abs(truth) + 1.0))
        if abs(size) > 8 * float(np.median(noise)) and (np.abs(moved - size) < 0.02 * abs(size) + noise).all():
            return f"{size:+.4g} is added to every {name}"
    return ""


def _summed(found: np.ndarray, truth: np.ndarray) -> str:
    """Sums from the start, or means so far, instead of a value a token."""
    sums = np.cumsum(truth)
    for name, guess in (("sums", sums), ("means", sums / np.arange(1, len(sums) + 1))):
        if np.abs(found - guess).mean() < 1e-3 * np.abs(found - truth).mean():
            return f"the values are the {name} of the reference's from the first token on"
    return ""


def unrelated_values(evidence: Evidence) -> Iterator[Suggestion]:
    """As likely as right ones on the whole, and nothing to do with them token by token."""
    found, truth = _finite(evidence)
    if found.size < _LEAST or (np.abs(found - truth) > 0.05).mean() < 0.8:
        return
    alike = correlation(found, truth)
    quarters = np.quantile(found, (0.25, 0.5, 0.75)), np.quantile(truth, (0.25, 0.5, 0.75))
    spread = float(truth.std())
    if abs(alike) < 0.35 and np.abs(quarters[0] - quarters[1]).max() < 0.75 * spread:
        yield Suggestion(
            "unrelated_values",
            HINT,
            f"correlation with the reference {alike:.2f}, though the values lie where its own do (medians"
            f" {quarters[0][1]:.3g} and {quarters[1][1]:.3g}): as those of another sample would",
        )


def _finite(evidence: Evidence) -> tuple[np.ndarray, np.ndarray]:
    usable = evidence.active & np.isfinite(evidence.found) & np.isfinite(evidence.truth)
    return evidence.found[usable].astype(np.float64), evidence.truth[usable].astype(np.float64)
