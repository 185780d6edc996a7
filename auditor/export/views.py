"""The shapes of the API's answers, for OpenAPI and for whoever reads them."""

from dataclasses import asdict
from typing import Any

import numpy as np
from pydantic import BaseModel

from auditor.compare import Logprobs
from auditor.drift import statistics
from auditor.judge import Faulty, Reference, Verdict
from auditor.records import Record, RolloutRecord
from auditor.sampling import miss_probability
from auditor.storage.curve import CurvePoint
from auditor.storage.rows import RunRow, SampleRow, StepRow, Totals


class Detection(BaseModel):
    """What recomputing a share buys against a fault that both sides have; a one-sided fault is always seen.

    recomputed_share: of the samples whose sides agree, for only in those it could hide. missed: chance that a fault
    escapes, by the share of samples it is on.
    """

    recomputed_share: float
    missed: dict[str, float]


class Counts(BaseModel):
    """Counts of a step or a run.

    mismatched_tokens: between the sides. recomputed_mismatched: recomputed tokens on which at least one side differs
    from the reference; rollout_mismatched, trainer_mismatched: by side. queued: samples that wait for the reference.
    missing: samples that wait for a side. max_abs, max_ulp, drift: None where no two finite values were compared,
    max_ulp unless an infinity is apart from something.
    """

    samples: int
    compared_tokens: int
    mismatched_tokens: int
    explained_tokens: int
    nonfinite_tokens: int
    max_abs: float | None
    max_ulp: int | None
    recomputed_tokens: int
    recomputed_mismatched: int
    rollout_mismatched: int
    trainer_mismatched: int
    queued: int
    by_verdict: dict[str, int]
    by_condition: dict[str, int]
    by_side: dict[str, int]
    by_cause: dict[str, int]
    by_reference: dict[str, int]
    missing: dict[str, int]
    detection: Detection | None
    weight_versions: tuple[int, int] | None
    drift: dict[str, float | int | None]


class Run(Counts):
    """A run. first_at, last_at: Unix seconds of its first and last record."""

    run_id: str
    first_at: float
    last_at: float
    steps: int
    first_step: int | None
    last_step: int | None


class Runs(BaseModel):
    """The runs, the last active first."""

    runs: list[Run]


class Step(Counts):
    """A step of a run."""

    run_id: str
    step: int


class Steps(BaseModel):
    """Steps in ascending order; next: the `first` that goes on from here, None at the end."""

    steps: list[Step]
    next: int | None


class Curve(BaseModel):
    """Points in ascending order of their steps."""

    points: list[CurvePoint]


class Sample(BaseModel):
    """A sample and its judgement; docs/audit-protocol.md explains each field."""

    run_id: str
    step: int
    sample_id: str
    judgement: dict[str, Any]


class Samples(BaseModel):
    """Samples of a step in order of their id; next: the `after` that goes on from here, None at the end."""

    samples: list[Sample]
    next: str | None


class Capsule(BaseModel):
    """A mismatch that can be frozen; the file itself is at /capsules/{step}/{sample_id}. Fields as in a judgement."""

    run_id: str
    step: int
    sample_id: str
    side: str
    cause: str
    evidence: str
    compared: int
    differing: int
    first_index: int | None
    max_abs: float | None
    max_ulp: int | None
    weight_version: int


class Capsules(BaseModel):
    """Capsules by step and sample; next: the `after` that goes on from here, None at the end."""

    capsules: list[Capsule]
    next: str | None


class SideView(BaseModel):
    """What one side reported. bits: the log-probabilities' bit patterns in hex; logprobs: None where not finite."""

    source_id: str
    weight_version: int
    weight_digest: str
    contract_digest: str
    environment: dict[str, str | list[str]]
    sampling: dict[str, Any]
    layout: dict[str, Any]
    positions: dict[str, Any]
    prompt_len: int
    tokens: list[int] | None
    tokens_digest: str
    mask: list[bool]
    logprobs: list[float | None]
    bits: list[str]
    layer_digests: list[str]


class SampleDetail(Sample):
    """A sample with its evidence; a side is None where it has not reported or its evidence has been retired.

    reference_*: under the rollout's contract, None where the reference was not asked.
    """

    rollout: SideView | None
    trainer: SideView | None
    reference_bits: list[str] | None
    reference_logprobs: list[float | None] | None


class Problem(BaseModel):
    """An error as RFC 9457 writes it; code is stable."""

    type: str
    title: str
    status: int
    detail: str
    code: str


class Version(BaseModel):
    """What this auditor is."""

    version: str
    contracts: list[str]


def counts(totals: Totals) -> dict[str, Any]:
    """The fields of `Counts`."""
    drift = asdict(statistics(totals.drift))
    return {
        "samples": totals.samples,
        "compared_tokens": totals.compared_tokens,
        "mismatched_tokens": totals.mismatched_tokens,
        "explained_tokens": totals.explained_tokens,
        "nonfinite_tokens": totals.nonfinite_tokens,
        "max_abs": drift["max_abs_diff"],
        # Two different infinities are apart too; nothing at all is not apart by 0.
        "max_ulp": totals.max_ulp if totals.max_ulp or totals.drift.tokens else None,
        "recomputed_tokens": totals.recomputed_tokens,
        "recomputed_mismatched": totals.reference_differing,
        "rollout_mismatched": totals.rollout_differing,
        "trainer_mismatched": totals.trainer_differing,
        "queued": totals.references.get(Reference.QUEUED.value, 0),
        "by_verdict": dict(totals.verdicts),
        "by_condition": dict(totals.conditions),
        "by_side": dict(totals.sides),
        "by_cause": dict(totals.causes),
        "by_reference": dict(totals.references),
        "missing": dict(totals.missing),
        "detection": _detection(totals),
        "weight_versions": totals.weight_versions,
        "drift": drift,
    }


def _detection(totals: Totals) -> Detection | None:
    agreeing = totals.verdict(Verdict.MATCH)
    if agreeing == 0:
        return None
    # A mismatch has a side as soon as it was recomputed.
    mismatches = totals.verdict(Verdict.MISMATCH) - totals.sides.get(Faulty.UNKNOWN.value, 0)
    share = (totals.references.get(Reference.DONE.value, 0) - mismatches) / agreeing
    missed = {f"{fault:g}": miss_probability(share, fault, agreeing) for fault in (0.001, 0.01, 0.1, 1.0)}
    return Detection(recomputed_share=share, missed=missed)


def run_view(row: RunRow) -> Run:
    """A run as the API shows it."""
    return Run(
        run_id=row.run_id,
        first_at=row.first_at,
        last_at=row.last_at,
        steps=row.steps,
        first_step=row.first_step,
        last_step=row.last_step,
        **counts(row.totals),
    )


def step_view(row: StepRow) -> Step:
    """A step as the API shows it."""
    return Step(run_id=row.run_id, step=row.step, **counts(row.totals))


def sample_view(row: SampleRow) -> Sample:
    """A sample as a list shows it."""
    return Sample(**row.key._asdict(), judgement=row.judgement.to_json())


def capsule_view(row: SampleRow) -> Capsule:
    """A mismatch as the list of capsules shows it. evidence: of the likeliest cause."""
    judgement = row.judgement
    return Capsule(
        **row.key._asdict(),
        side=judgement.side.value,
        cause=judgement.cause,
        evidence=str(judgement.causes[0]["evidence"]) if judgement.causes else "",
        compared=judgement.compared,
        differing=max(judgement.differing, judgement.reference_differing),
        first_index=judgement.first_index,
        max_abs=judgement.max_abs,
        max_ulp=judgement.max_ulp,
        weight_version=judgement.weight_version,
    )


def detail_view(
    row: SampleRow, rollout: Record | None, trainer: Record | None, reference: Logprobs | None
) -> SampleDetail:
    """A sample with its evidence."""
    return SampleDetail(
        **row.key._asdict(),
        judgement=row.judgement.to_json(),
        rollout=_side(rollout),
        trainer=_side(trainer),
        reference_bits=None if reference is None else _bits(reference),
        reference_logprobs=None if reference is None else _numbers(reference),
    )


def _side(record: Record | None) -> SideView | None:
    if record is None:
        return None
    return SideView(
        source_id=record.engine_id if isinstance(record, RolloutRecord) else record.trainer_id,
        weight_version=record.weight_version,
        weight_digest=record.weight_digest,
        contract_digest=record.contract_digest,
        environment={**asdict(record.environment), "versions": list(record.environment.versions)},
        sampling=asdict(record.sampling),
        layout=asdict(record.layout),
        positions=record.positions.to_json(),
        prompt_len=record.prompt_len,
        tokens=None if record.tokens is None else record.tokens.tolist(),
        tokens_digest=record.tokens_digest,
        mask=record.mask.tolist(),
        logprobs=_numbers(record.logprobs),
        bits=_bits(record.logprobs),
        layer_digests=list(record.layer_digests),
    )


def _numbers(logprobs: Logprobs) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in logprobs]


def _bits(logprobs: Logprobs) -> list[str]:
    return [f"{bits:08x}" for bits in logprobs.view(np.uint32)]
