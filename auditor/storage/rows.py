"""What the ledger says of runs, steps and samples: the rows that readers get."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from auditor.drift import NOTHING, DriftSums
from auditor.judge import Judgement, Reference, Verdict
from auditor.records import SampleKey


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts that add up over samples; of a step or of a run.

    rollout_differing, trainer_differing: recomputed tokens that differ from the reference on that side;
    reference_differing: on at least one.
    conditions: samples by failed precondition. sides, causes: mismatched samples by the side that is wrong and by
    their first cause; a sample that could not be compared is no mismatch, and counts under its condition only.
    """

    samples: int = 0
    verdicts: Mapping[str, int] = field(default_factory=dict)
    compared_tokens: int = 0
    mismatched_tokens: int = 0
    explained_tokens: int = 0
    nonfinite_tokens: int = 0
    max_ulp: int = 0
    references: Mapping[str, int] = field(default_factory=dict)
    recomputed_tokens: int = 0
    rollout_differing: int = 0
    trainer_differing: int = 0
    reference_differing: int = 0
    conditions: Mapping[str, int] = field(default_factory=dict)
    sides: Mapping[str, int] = field(default_factory=dict)
    causes: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)
    weight_versions: tuple[int, int] | None = None
    drift: DriftSums = NOTHING

    def __add__(self, other: "Totals") -> "Totals":
        versions = [v for pair in (self.weight_versions, other.weight_versions) if pair for v in pair]
        merged = {
            name: _added(getattr(self, name), getattr(other, name))
            for name in self.__slots__
            if name not in ("max_ulp", "weight_versions")
        }
        return Totals(
            **merged,
            max_ulp=max(self.max_ulp, other.max_ulp),
            weight_versions=(min(versions), max(versions)) if versions else None,
        )

    def verdict(self, verdict: Verdict) -> int:
        """Samples with this verdict."""
        return self.verdicts.get(verdict.value, 0)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "drift": self.drift.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        versions = values.get("weight_versions")
        return cls(
            **{
                **values,
                "drift": DriftSums.from_json(values["drift"]),
                "weight_versions": tuple(versions) if versions else None,
            }
        )


def change(before: Judgement | None, after: Judgement, drift: DriftSums) -> Totals:
    """What a sample's step gains when its judgement goes from `before` to `after`.

    drift: of the pair, given once, when it is first compared.
    """
    gained = _of(after)
    if before is None:
        return replace(gained, samples=1, drift=drift)
    lost = _of(before)
    names = ("verdicts", "references", "conditions", "sides", "causes", "missing")
    differences = {name: _added(getattr(gained, name), _negated(getattr(lost, name))) for name in names}
    numbers = (
        "compared_tokens", "mismatched_tokens", "explained_tokens", "nonfinite_tokens",
        "recomputed_tokens", "rollout_differing", "trainer_differing", "reference_differing",
    )  # fmt: skip
    return replace(
        gained,
        **differences,
        **{name: getattr(gained, name) - getattr(lost, name) for name in numbers},
        samples=0,
        drift=drift,
    )


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run. first_at, last_at: Unix seconds of its first and last record."""

    run_id: str
    first_at: float
    last_at: float
    steps: int
    first_step: int | None
    last_step: int | None
    totals: Totals


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step of a run."""

    run_id: str
    step: int
    totals: Totals


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A sample and the present judgement of it."""

    key: SampleKey
    judgement: Judgement


def _of(judgement: Judgement) -> Totals:
    mismatch = judgement.verdict is Verdict.MISMATCH
    explained = judgement.explained_by_arithmetic or not judgement.same_arithmetic
    done = judgement.reference is Reference.DONE
    return Totals(
        verdicts={judgement.verdict.value: 1},
        compared_tokens=judgement.compared,
        mismatched_tokens=0 if explained else judgement.differing,
        explained_tokens=judgement.differing if explained else 0,
        nonfinite_tokens=judgement.nonfinite_rollout + judgement.nonfinite_trainer,
        max_ulp=judgement.max_ulp,
        references={judgement.reference.value: 1} if judgement.reference is not Reference.NOT_ASKED else {},
        recomputed_tokens=judgement.compared if done else 0,
        rollout_differing=judgement.rollout_differing,
        trainer_differing=judgement.trainer_differing,
        reference_differing=judgement.reference_differing,
        conditions={judgement.condition: 1} if judgement.condition else {},
        sides={judgement.side.value: 1} if mismatch else {},
        causes={judgement.cause: 1} if mismatch and judgement.cause else {},
        missing={judgement.missing: 1} if judgement.missing else {},
        weight_versions=(judgement.weight_version,) * 2 if judgement.weight_version >= 0 else None,
    )


def _negated(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: -count for name, count in counts.items()}


def _added(ours: Any, theirs: Any) -> Any:
    """Sum of two numbers, two DriftSums, or two tables of counts without the zeros."""
    if not isinstance(ours, dict):
        return ours + theirs
    if not theirs or not ours:
        return ours or theirs
    summed = {name: ours.get(name, 0) + theirs.get(name, 0) for name in (*ours, *theirs)}
    return {name: count for name, count in summed.items() if count}
