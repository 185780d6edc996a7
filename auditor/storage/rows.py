"""What the ledger says of runs, steps and samples: the rows that readers get."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Self

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
        return self.of((self, other))

    @classmethod
    def of(cls, parts: Sequence["Totals"]) -> "Totals":
        """The totals of several parts together."""
        versions = [version for part in parts if part.weight_versions for version in part.weight_versions]
        # Column by column, as in `DriftSums.of`.
        numbers = map(sum, zip(*map(_ALL_NUMBERS, parts), strict=True))
        tables = map(_table, zip(*map(_ALL_TABLES, parts), strict=True))
        summed: dict[str, Any] = dict(zip((*_NUMBERS, *_TABLES), (*numbers, *tables), strict=True))
        return cls(
            **summed,
            max_ulp=max((part.max_ulp for part in parts), default=0),
            weight_versions=(min(versions), max(versions)) if versions else None,
            drift=DriftSums.of(part.drift for part in parts),
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


_NUMBERS: Final = (
    "samples", "compared_tokens", "mismatched_tokens", "explained_tokens", "nonfinite_tokens",
    "recomputed_tokens", "rollout_differing", "trainer_differing", "reference_differing",
)  # fmt: skip
_TABLES: Final = ("verdicts", "references", "conditions", "sides", "causes", "missing")
_ALL_NUMBERS: Final = attrgetter(*_NUMBERS)
_ALL_TABLES: Final = attrgetter(*_TABLES)


def change(before: Judgement | None, after: Judgement, drift: DriftSums) -> list[Totals]:
    """What a sample's step gains when its judgement goes from `before` to `after`, in parts that are to be added up.

    drift: of the pair, given once, when it is first compared.
    """
    if before is None:
        return [_of(after, 1, samples=1, drift=drift)]
    return [_of(after, 1, drift=drift), _of(before, -1)]


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


def _of(judgement: Judgement, sign: int, samples: int = 0, drift: DriftSums = NOTHING) -> Totals:
    """What a judgement counts for; sign -1 takes it back, but for extrema, which nothing takes back."""
    mismatch = judgement.verdict is Verdict.MISMATCH
    explained = judgement.explained_by_arithmetic or not judgement.same_arithmetic
    compared, differing = sign * judgement.compared, sign * judgement.differing
    gained, version = sign > 0, judgement.weight_version
    return Totals(
        samples=samples,
        verdicts={judgement.verdict.value: sign},
        compared_tokens=compared,
        mismatched_tokens=0 if explained else differing,
        explained_tokens=differing if explained else 0,
        nonfinite_tokens=sign * (judgement.nonfinite_rollout + judgement.nonfinite_trainer),
        max_ulp=(judgement.max_ulp or 0) if gained else 0,
        references={judgement.reference.value: sign} if judgement.reference is not Reference.NOT_ASKED else {},
        recomputed_tokens=compared if judgement.reference is Reference.DONE else 0,
        rollout_differing=sign * judgement.rollout_differing,
        trainer_differing=sign * judgement.trainer_differing,
        reference_differing=sign * judgement.reference_differing,
        conditions={judgement.condition: sign} if judgement.condition else {},
        sides={judgement.side.value: sign} if mismatch else {},
        causes={judgement.cause: sign} if mismatch and judgement.cause else {},
        missing={judgement.missing: sign} if judgement.missing else {},
        weight_versions=(version, version) if gained and version >= 0 else None,
        drift=drift,
    )


def _table(tables: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """The sum of tables of counts, without the zeros."""
    some = [table for table in tables if table]
    if len(some) < 2:
        return some[0] if some else {}
    summed: dict[str, int] = {}
    for table in some:
        for name, count in table.items():
            summed[name] = summed.get(name, 0) + count
    return {name: count for name, count in summed.items() if count}
