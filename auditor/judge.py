"""From a comparison, and the reference where it was run, to a verdict and the side that is wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

import numpy as np

from auditor.causes.inputs import cause_of_failure
from auditor.compare import Comparison, Logprobs, Mask, compare_logprobs, first_layer
from auditor.drift import NOTHING, DriftSums
from auditor.preconditions import Contracts, NotComparable, first_failure
from auditor.records import SIDES, Record, RolloutRecord, TrainerRecord
from rl_kernel.errors import ShapeError

# The condition of a sample that waited in vain; no precondition was looked at.
MISSING_SIDE: Final = "missing_side"
_NEVER_CAME: Final = "never came"
# Causes that are none: they are being looked for; nobody looked; nothing was found.
SEARCHING: Final = "searching"
UNDIAGNOSED: Final = "undiagnosed"
UNKNOWN: Final = "unknown"
# What a failed precondition suggests, by its field, which may name a token.
_CAUSES_OF_POSITIONS: Final = {
    "positions.ids": "position_offset",
    "positions.ids_digest": "position_offset",
    "positions.first_keys": "attention_mask",
    "positions.left_padding": "attention_mask",
}


class Verdict(StrEnum):
    """What can be said of a sample. `pending`: one side is missing. `error`: the auditor itself could not tell."""

    MATCH = "match"
    MISMATCH = "mismatch"
    NOT_COMPARABLE = "not_comparable"
    PENDING = "pending"
    ERROR = "error"


class Faulty(StrEnum):
    """Which side differs from the reference. `unknown`: the reference has not spoken on a mismatch."""

    ROLLOUT = "rollout"
    TRAINER = "trainer"
    BOTH = "both"
    NONE = "none"
    UNKNOWN = "unknown"


class Reference(StrEnum):
    """Where the recomputation of a sample stands. `skipped`: it was chosen, and too many others waited."""

    NOT_ASKED = "not_asked"
    QUEUED = "queued"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Judgement:
    """All that is known of one sample.

    cause, causes: the likeliest cause and all suggestions, with score and evidence; `searching` until the search is
    over, `unknown` where it found none, `undiagnosed` where enough samples of the step had been looked into.
    missing: the side that has not reported, while pending. condition, field, rollout_value, trainer_value: of the
    precondition that failed. compared … nonfinite_trainer: of the pair, see `Comparison`; bit patterns in hex. max_abs,
    max_ulp: None where no two finite values were compared (ledgers of earlier programs hold 0 there), max_ulp unless
    an infinity is apart from something.
    rollout_differing, trainer_differing: tokens that differ from the reference; reference_differing: on either side.
    reference_error: code and reason. layers: of which a side reported digests. first_layer: where both sides report
    them, the first layer that differs, or `layers` where only what comes behind the last one does.
    rollout_first_layer, trainer_first_layer: the same against the reference.
    """

    verdict: Verdict
    side: Faulty = Faulty.NONE
    cause: str = ""
    causes: tuple[dict[str, Any], ...] = ()
    missing: str = ""
    condition: str = ""
    field: str = ""
    rollout_value: str = ""
    trainer_value: str = ""
    compared: int = 0
    differing: int = 0
    first_index: int | None = None
    rollout_bits: str = ""
    trainer_bits: str = ""
    max_abs: float | None = None
    max_ulp: int | None = None
    nonfinite_rollout: int = 0
    nonfinite_trainer: int = 0
    same_arithmetic: bool = True
    explained_by_arithmetic: bool = False
    reference: Reference = Reference.NOT_ASKED
    reference_error: str = ""
    reference_mma: str = ""
    rollout_differing: int = 0
    trainer_differing: int = 0
    reference_differing: int = 0
    weight_version: int = -1
    layers: int = 0
    first_layer: int | None = None
    rollout_first_layer: int | None = None
    trainer_first_layer: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(
            **{
                **values,
                "verdict": Verdict(values["verdict"]),
                "side": Faulty(values["side"]),
                "reference": Reference(values["reference"]),
                "causes": tuple(values["causes"]),
            }
        )


@dataclass(frozen=True, slots=True)
class PairJudgement:
    """A judgement of two records with what it was made from; `comparison` is None where they are not comparable."""

    judgement: Judgement
    comparison: Comparison | None

    @property
    def drift(self) -> DriftSums:
        """Sums for the step's statistics; empty where nothing was compared."""
        return NOTHING if self.comparison is None else self.comparison.drift


def judge_pair(rollout: RolloutRecord, trainer: TrainerRecord, contracts: Contracts) -> PairJudgement:
    """Check the preconditions, then compare bits."""
    failure = first_failure(rollout, trainer, contracts)
    if failure is not None:
        return PairJudgement(_not_comparable(failure, rollout, trainer), None)
    comparison = compare_logprobs(rollout.logprobs, trainer.logprobs, rollout.mask)
    difference = comparison.difference
    bits = comparison.first_bits
    judgement = Judgement(
        verdict=Verdict.MATCH if difference.equal else Verdict.MISMATCH,
        side=Faulty.NONE if difference.equal else Faulty.UNKNOWN,
        compared=difference.compared,
        differing=difference.differing,
        first_index=comparison.first_index,
        rollout_bits=f"{bits[0]:08x}" if bits else "",
        trainer_bits=f"{bits[1]:08x}" if bits else "",
        max_abs=difference.max_abs,
        # As a step says it: what is compared and not finite is not apart by 0; two different infinities are apart.
        max_ulp=difference.max_ulp if difference.max_ulp or difference.max_abs is not None else None,
        nonfinite_rollout=comparison.nonfinite_rollout,
        nonfinite_trainer=comparison.nonfinite_trainer,
        same_arithmetic=rollout.contract_digest == trainer.contract_digest,
        weight_version=rollout.weight_version,
        layers=max(len(rollout.layer_digests), len(trainer.layer_digests)),
        first_layer=_began(first_layer(rollout.layer_digests, trainer.layer_digests), rollout, not difference.equal),
    )
    return PairJudgement(judgement, comparison)


@dataclass(frozen=True, slots=True)
class ReferenceLogprobs:
    """The reference's log-probabilities of the response, float32 [R], under each side's own contract.

    trainer is the very same array where both sides hold one contract. mma: the models that were followed.
    causes: where they were searched for: suggestions for the sides that differ, the likeliest first. first_layers: of
    rollout and trainer, see `compare.first_layer`, where they report digests of their layers.
    """

    rollout: Logprobs
    trainer: Logprobs
    mma: str
    causes: tuple[dict[str, Any], ...] | None = None
    first_layers: tuple[int | None, int | None] = (None, None)


def judge_with_reference(
    judgement: Judgement, rollout: RolloutRecord, trainer: TrainerRecord, reference: ReferenceLogprobs
) -> Judgement:
    """Say which side differs from the reference, and nothing of why. Two sides that agree can both be wrong."""
    differs_rollout = _differs(rollout.logprobs, reference.rollout, rollout.mask)
    differs_trainer = _differs(trainer.logprobs, reference.trainer, trainer.mask)
    of_rollout, of_trainer = int(differs_rollout.sum()), int(differs_trainer.sum())
    side = {
        (False, False): Faulty.NONE,
        (True, False): Faulty.ROLLOUT,
        (False, True): Faulty.TRAINER,
        (True, True): Faulty.BOTH,
    }[of_rollout > 0, of_trainer > 0]
    explained = judgement.verdict is Verdict.MISMATCH and side is Faulty.NONE
    assert not (explained and judgement.same_arithmetic), "two sides equal to one reference cannot differ"
    return replace(
        judgement,
        verdict=Verdict.MATCH if side is Faulty.NONE and not explained else Verdict.MISMATCH,
        side=side,
        explained_by_arithmetic=explained,
        causes=(),
        cause="" if side is Faulty.NONE else UNDIAGNOSED,
        reference=Reference.DONE,
        reference_mma=reference.mma,
        rollout_differing=of_rollout,
        trainer_differing=of_trainer,
        reference_differing=int((differs_rollout | differs_trainer).sum()),
        rollout_first_layer=_began(reference.first_layers[0], rollout, of_rollout > 0),
        trainer_first_layer=_began(reference.first_layers[1], trainer, of_trainer > 0),
    )


def with_causes(judgement: Judgement, causes: tuple[dict[str, Any], ...] | None, why: str = "") -> Judgement:
    """The same with what a search for causes found, and where by its layers it began; None: it failed, and why."""
    if causes is None:
        failed = ({"cause": UNDIAGNOSED, "score": 0.0, "evidence": why},) if why else ()
        return replace(judgement, cause=UNDIAGNOSED, causes=failed)
    if causes and (layers := _layers(judgement)):
        causes = ({**causes[0], "evidence": f"{causes[0]['evidence']}; {layers}"}, *causes[1:])
    return replace(judgement, cause=str(causes[0]["cause"]) if causes else UNKNOWN, causes=causes)


def pending(missing: str, weight_version: int) -> Judgement:
    """One side has reported, `missing` has not."""
    return Judgement(Verdict.PENDING, missing=missing, weight_version=weight_version)


def given_up(waiting: Judgement) -> Judgement:
    """A sample whose other side did not come in time: neither a match nor a mismatch, until it comes after all."""
    came = {side: _NEVER_CAME if side == waiting.missing else "reported" for side in SIDES}
    return Judgement(
        Verdict.NOT_COMPARABLE,
        condition=MISSING_SIDE,
        field="record",
        rollout_value=came["rollout"],
        trainer_value=came["trainer"],
        weight_version=waiting.weight_version,
    )


def _not_comparable(failure: NotComparable, rollout: RolloutRecord, trainer: TrainerRecord) -> Judgement:
    suggestion = cause_of_failure(failure, rollout, trainer)
    cause = _CAUSES_OF_POSITIONS.get(failure.field.partition("[")[0], suggestion.cause)
    suggestion = replace(suggestion, cause=cause)
    return Judgement(
        Verdict.NOT_COMPARABLE,
        cause=suggestion.cause,
        causes=(suggestion.to_json(),),
        condition=failure.condition.value,
        field=failure.field,
        rollout_value=failure.rollout,
        trainer_value=failure.trainer,
        weight_version=rollout.weight_version,
    )


def _began(layer: int | None, record: Record, differs: bool) -> int | None:
    """A first differing layer; the one behind the last where all digests are equal and values are not."""
    return None if layer == len(record.layer_digests) and not differs else layer


def _layers(judgement: Judgement) -> str:
    """What the digests of layers say of where a difference began; empty where nobody reported any."""
    found = [
        f"the {side} leaves the reference {_where(layer, judgement.layers)}"
        for side, layer in zip(SIDES, (judgement.rollout_first_layer, judgement.trainer_first_layer), strict=True)
        if layer is not None
    ]
    if not found and judgement.first_layer is not None:
        found = [f"the sides part {_where(judgement.first_layer, judgement.layers)}"]
    return f"by the digests of layers {' and '.join(found)}" if found else ""


def _where(layer: int, layers: int) -> str:
    return f"at layer {layer}" if layer < layers else "behind the last layer"


def _differs(logprobs: Logprobs, reference: Logprobs, mask: Mask) -> Mask:
    """Bool [R]: active tokens whose bits are not the reference's."""
    if logprobs.shape != reference.shape:
        raise ShapeError(f"the reference has {reference.shape} values where the record has {logprobs.shape}")
    differs: Mask = (logprobs.view(np.uint32) != reference.view(np.uint32)) & mask
    return differs
