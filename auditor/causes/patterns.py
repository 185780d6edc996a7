"""What differences look like where nothing that was computed explains them: hints, each with a name of many causes.

Their scores stay below that of anything that was computed and takes away half of the difference.

noise: what rounding alone makes of this sample, where a reference could be asked.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import HINT, Evidence, Suggestion, correlation

_USUAL_NOISE: Final = 0.015  # where nobody could be asked
_BEYOND: Final = 3.0  # times the noise: more than another order of sums makes
BEYOND_BY_BOTH: Final = 5.0  # the same, where neither side computes as the reference does
_FALLBACK: Final = 0.35  # much looks like it
_TRENDING: Final = 0.42
_FAR_BELOW: Final = 0.03
_LEAST_OF_16_BITS: Final = 3e-5
_LEAST: Final = 12
_GROWTH: Final = 4.0
_SHRINKING: Final = 1.3
_MOST_OF: Final = 0.9
_TREND: Final = 0.15
_AT_LEAST: Final = 0.1  # the same, of parts
_UNSURE: Final = 0.02  # a row's mass that others have than its token: with less there is nothing to tell
_BLOCKS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048)
_NO_MORE: Final = 1.5  # times the noise: what keys cut in parts make, too, from the second part on


def flat_last_bits(evidence: Evidence, noise: float | None) -> Iterator[Suggestion]:
    """Differences of the size of rounding at many tokens, of both signs, that neither grow nor cluster."""
    delta = evidence.delta[evidence.active]
    differing = delta[delta != 0.0]
    if differing.size == 0 or np.abs(delta).max() > 0.25 or np.median(np.abs(differing)) > _limit(evidence, noise):
        return
    both_signs = bool(min((differing > 0).mean(), (differing < 0).mean()) > 0.1)
    halves = [float(np.abs(half).mean()) for half in np.array_split(delta, 2) if half.size]
    flat = max(halves) < 4.0 * max(min(halves), 1e-12)
    score = 0.24 + 0.08 * both_signs + 0.08 * flat + 0.04 * (differing.size > 0.5 * delta.size)
    # What any rounding inside of the model does is larger than this, where it does anything.
    behind = noise is not None and _LEAST_OF_16_BITS < np.median(np.abs(delta)) < _FAR_BELOW * noise
    yield Suggestion(
        "bf16_head" if behind and differing.size > _MOST_OF * delta.size else "reduction_order",
        score,
        f"{differing.size} of {delta.size} tokens differ, by {np.median(np.abs(differing)):.3g} in the median and"
        f" {np.abs(delta).max():.3g} at most, {'of both signs' if both_signs else 'mostly of one sign'}, "
        + ("evenly along the response" if flat else "unevenly along the response"),
    )


def other_weights(evidence: Evidence, noise: float | None) -> Iterator[Suggestion]:
    """Differences everywhere, beyond rounding and of both signs: another model, of which nothing is known."""
    delta = evidence.delta[evidence.active]
    differing = delta[delta != 0.0]
    if differing.size < max(4, 0.9 * delta.size) or np.median(np.abs(differing)) < _limit(evidence, noise):
        return
    # Other weights make what was drawn less likely; a filter or a lower temperature makes it likelier.
    if (differing < 0).mean() > 0.3:
        alike = correlation(evidence.found, evidence.truth)
        yield Suggestion(
            "other_weights",
            _FALLBACK,
            f"{differing.size} of {delta.size} tokens differ, by {np.median(np.abs(differing)):.3g} in the median,"
            f" correlation with the reference {alike:.3f}: as with weights of which no version is known",
        )


def trend(evidence: Evidence, noise: float | None) -> Iterator[Suggestion]:
    """Differences that grow along the response, as wrong angles make them, or shrink, as wrong tokens in front do.

    The further a response goes on, the more of what it sees is its own. And the surer a model is of it, the less does
    anything move its values: so they must shrink beside how sure it is, too.
    """
    size = np.abs(evidence.delta)[evidence.active]
    if size.size < _LEAST or np.median(size) < _limit(evidence, noise):
        return
    thirds = [float(third.mean()) for third in np.array_split(size, 3)]
    rank = _rank_correlation(size)
    numbers = f"mean {thirds[0]:.3g} in its first third, {thirds[-1]:.3g} in its last, rank correlation {rank:.2f}"
    if rank > 0.5 and thirds[-1] > _GROWTH * thirds[0] and (size[: len(size) // 4] > 0.0).mean() > 0.5:
        yield Suggestion("rope_scaling", _TRENDING, f"the difference grows along the response: {numbers}")
    if rank < -_TREND and thirds[0] > _SHRINKING * thirds[-1] and (size > 0.0).mean() > 0.9 and _beside(evidence):
        yield Suggestion(
            "other_context",
            _TRENDING,
            f"the difference shrinks along the response, as where other tokens stand in front of it: {numbers}",
        )


def _beside(evidence: Evidence) -> bool:
    """Whether differences shrink as parts of what a row can move by, too, which is how unsure it is of its token."""
    with np.errstate(over="ignore"):
        unsure = -np.expm1(np.minimum(evidence.truth.astype(np.float64), 0.0))
    told = evidence.active & (unsure > _UNSURE)
    size = np.abs(evidence.delta)[told] / unsure[told]
    if size.size < _LEAST:
        return False
    first, *_, last = (float(third.mean()) for third in np.array_split(size, 3))
    return _rank_correlation(size) < -_AT_LEAST and first > _SHRINKING * last


def begins_somewhere(evidence: Evidence, noise: float | None) -> Iterator[Suggestion]:
    """Equal bits up to some token and hardly any behind it: from there on another cache is read, or another chunk."""
    differs = np.flatnonzero(evidence.differs)
    after = int((np.flatnonzero(evidence.active) >= differs[0]).sum())
    if evidence.begins is not None and differs.size >= max(_LEAST, _MOST_OF * after):
        yield Suggestion(
            "kv_boundary",
            _TRENDING,
            f"every value up to token {differs[0]} is right, and {differs.size} of {after} are wrong from there on,"
            f" where position {evidence.begins} is computed",
        )


def boundary(evidence: Evidence, noise: float | None) -> Iterator[Suggestion]:
    """Equal bits up to a token at which a KV block or a chunk begins, differences from there on."""
    differs = np.flatnonzero(evidence.differs)
    active = np.flatnonzero(evidence.active)
    if differs.size < 2 or active.size == 0:
        return
    before = int((active < differs[0]).sum())
    after = int((active >= differs[0]).sum())
    # The first wrong value is that of the token after the first wrong query.
    starts = [int(evidence.positions[differs[0]]) - shift for shift in (0, 1)]
    blocks = [block for block in _BLOCKS for start in starts if start > 0 and start % block == 0]
    if before < 4 or not blocks or differs.size < 0.5 * after:
        return
    score = HINT + (0.05 if max(blocks) >= 64 else -0.1) + 0.05 * (before >= 8)
    if noise is not None and float(np.median(np.abs(evidence.delta[differs]))) < _NO_MORE * noise:
        score = _FALLBACK
    yield Suggestion(
        "kv_boundary",
        score,
        f"the first {before} tokens are equal in every bit, then {differs.size} of {after} differ, from position"
        f" {int(evidence.positions[differs[0]])} on, where a block of {max(blocks)} begins",
    )


def _limit(evidence: Evidence, noise: float | None) -> float:
    """The median difference beyond which it is more than rounding."""
    if noise is None:
        return _BEYOND * _USUAL_NOISE
    return noise * (_BEYOND if evidence.alone else BEYOND_BY_BOTH)


def _rank_correlation(values: np.ndarray) -> float:
    """Spearman's, with the index."""
    if values.std() == 0.0:
        return 0.0
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])
