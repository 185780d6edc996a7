"""What a diagnosis looks at, and how well a hypothesis explains it."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from auditor.compare import Logprobs, Mask
from auditor.records import Record, RolloutRecord, TrainerRecord

# Scores: a prediction right in every bit is certain, and one that is right wherever the side is wrong nearly so: the
# fault then touches a part. From SETTLED on nothing more is looked for. One that is right up to noise is strong. A
# pattern that nothing was computed for is a hint, and stays below both.
CERTAIN: Final = 1.0
IN_PART: Final = 0.97
SETTLED: Final = 0.95
STRONG: Final = 0.9
HINT: Final = 0.6
_WORTH_SAYING: Final = 0.5
_RESEMBLES: Final = 0.9
_ENOUGH_TO_RESEMBLE: Final = 8
_ENOUGH_BEFORE: Final = 4
_ENOUGH_AMONG: Final = 8
_AMONG: Final = 0.25
_FAR: Final = 0.1
_MOSTLY: Final = 0.5
_UNSURE: Final = 0.9
LAST_BITS: Final = 1e-5  # a difference that anything may make by chance


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One possible cause. score: 0..1, see above. evidence: one sentence with the numbers that it rests on.

    sure: whether so much of the difference is nothing's doing by chance, whatever else was not tried. side: whose
    values they are said of, `both` where it is much the same of both; empty where nobody asked.
    """

    cause: str
    score: float
    evidence: str
    sure: bool = False
    side: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        said: dict[str, Any] = {"cause": self.cause, "score": round(self.score, 4), "evidence": self.evidence}
        return {**said, "side": self.side} if self.side else said


@dataclass(frozen=True, slots=True)
class Evidence:
    """One side beside what it should be.

    found: float32 [R], what the side reported; truth: float32 [R], the reference (or the other side where there is
    none). active: bool [R]. record: of the side; other: of the other side.
    """

    found: Logprobs
    truth: Logprobs
    active: Mask
    record: Record
    rollout: RolloutRecord
    trainer: TrainerRecord

    @property
    def differs(self) -> Mask:
        """Bool [R]: active tokens whose bits differ."""
        mask: Mask = (self.found.view(np.uint32) != self.truth.view(np.uint32)) & self.active
        return mask

    @property
    def begins(self) -> int | None:
        """The first token whose computation goes wrong, where enough values before it are equal in every bit.

        A value is computed by the token before its own.
        """
        differs, active = np.flatnonzero(self.differs), np.flatnonzero(self.active)
        if not differs.size or (active < differs[0]).sum() < _ENOUGH_BEFORE:
            return None
        return int(self.positions[differs[0]]) - 1

    @property
    def pointwise(self) -> bool:
        """Whether right values stand among values that are far off: each of these is wrong by itself.

        What a row does to those behind it, it does to all of them; only roundings pass some by.
        """
        differs, active = np.flatnonzero(self.differs), np.flatnonzero(self.active)
        far = differs[np.abs(self.delta[differs]) > _FAR]
        among = active[(active > far[0]) & (active < far[-1])] if far.size else active[:0]
        right = among.size - np.isin(among, differs).sum()
        return bool(right >= _ENOUGH_AMONG and right > _AMONG * among.size)

    @property
    def alone(self) -> bool:
        """Whether the other side is right in most of its bits, so that this one could have been."""
        other = self.trainer if self.record is self.rollout else self.rollout
        if len(other.logprobs) != len(self.truth):
            return True
        right = other.logprobs.view(np.uint32) == self.truth.view(np.uint32)
        return bool((right | ~self.active).mean() > _MOSTLY)

    @property
    def delta(self) -> Any:
        """float64 [R], found − truth; 0 where a value is not finite or the token is not active."""
        with np.errstate(invalid="ignore"):
            delta = self.found.astype(np.float64) - self.truth
        return np.where(np.isfinite(delta) & self.active, delta, 0.0)

    @property
    def positions(self) -> Any:
        """int64 [R]: absolute position of each response token in its sequence."""
        return self.rollout.prompt_len + np.arange(len(self.found))


def explained(found: Logprobs, truth: Logprobs, predicted: Logprobs, active: Mask) -> float:
    """How well `predicted` explains that `found` is not `truth`; all float32 [R].

    CERTAIN where every active token has the predicted bits and at least two of them are not the truth's; IN_PART where
    every one that is not the truth's has, SETTLED where they are less than four. Otherwise
    STRONG times the share of the mean difference that the prediction takes away; 0 where the side does not resemble the
    prediction, and more than it does the truth: a constant is near everything.
    """
    differs = (found.view(np.uint32) != truth.view(np.uint32)) & active
    hit = (found.view(np.uint32) == predicted.view(np.uint32)) & active
    if not differs.any():
        return 0.0
    if hit.sum() == active.sum():
        return CERTAIN if differs.sum() >= 2 else SETTLED
    if not (differs & ~hit).any():
        return _where_wrong(found, truth, predicted, differs, active)
    finite = np.isfinite(found) & np.isfinite(truth) & np.isfinite(predicted) & active
    if finite.sum() < _ENOUGH_TO_RESEMBLE:
        return 0.0  # of many predictions one resembles a few values by chance
    side, right, guess = (values[finite].astype(np.float64) for values in (found, truth, predicted))
    before = np.abs(side - right).mean() if finite.any() else 0.0
    if before == 0.0 or correlation(side, guess) < max(_RESEMBLES, correlation(side, right)):
        return 0.0
    return float(STRONG * max(0.0, 1.0 - np.abs(side - guess).mean() / before))


def _where_wrong(found: Logprobs, truth: Logprobs, predicted: Logprobs, differs: Mask, active: Mask) -> float:
    """Of a prediction right wherever the side is wrong, and nowhere else.

    A last bit of few values may be right by chance where it moves many more. And 0 is what everything has that was not
    computed, so that it says of nothing that it was.
    """
    sure = np.abs(found - truth)[differs].max() > LAST_BITS
    moved = (predicted.view(np.uint32) != truth.view(np.uint32)) & active
    if not sure and differs.sum() < _MOSTLY * moved.sum():
        return 0.0
    score = IN_PART if differs.sum() >= 4 else SETTLED if sure else STRONG
    return score if found[differs].any() else STRONG * _UNSURE


def correlation(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Pearson's, over the finite values; 0 where there are few or one side is constant."""
    finite = np.isfinite(a) & np.isfinite(b)
    x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
    if x.size < 4 or x.std() == 0.0 or y.std() == 0.0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def worth_saying(score: float) -> bool:
    """Whether a computed prediction explains enough to be suggested at all."""
    return score >= _WORTH_SAYING * STRONG


def bits_hit(found: Logprobs, predicted: Logprobs, active: Mask) -> str:
    """`31 of 32 tokens have the predicted bits`."""
    hit = int(((found.view(np.uint32) == predicted.view(np.uint32)) & active).sum())
    return f"{hit} of {int(active.sum())} tokens have the predicted bits"
