"""Receive, check, compare, ask the reference, judge, record. Everything here happens inside one transaction.

The words: a *receipt* says what became of a record; a *judgement* is what is known of a sample.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, Protocol

import numpy as np

from auditor.causes.sample import diagnose_pair
from auditor.compare import ULP_EDGES, Comparison
from auditor.drift import NOTHING
from auditor.errors import AuditorError, ConflictError, EvidenceError, RecomputeError, RecordError
from auditor.judge import (
    MISSING_SIDE,
    SEARCHING,
    UNKNOWN,
    Faulty,
    Judgement,
    PairJudgement,
    Reference,
    ReferenceLogprobs,
    Verdict,
    given_up,
    judge_pair,
    judge_with_reference,
    pending,
    with_causes,
)
from auditor.preconditions import Condition, Contracts
from auditor.records import Record, RolloutRecord, SampleKey, Side, TrainerRecord
from auditor.sampling import Candidate, Policy
from auditor.search_queue import SearchQueue
from auditor.storage.chain import digest
from auditor.storage.halves import Held
from auditor.storage.rows import Totals, change
from auditor.storage.unit import Stored, Unit

log = logging.getLogger(__name__)
# The label of a mismatch that needs no cause: two makers' arithmetics, and each side keeps to its own.
_ARITHMETIC: Final = "arithmetic"
_OTHER: Final[Mapping[Side, Side]] = {"rollout": "trainer", "trainer": "rollout"}


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one record. code, detail: why, where it was refused."""

    outcome: Literal["accepted", "duplicate", "refused"]
    code: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A record that holds together, and its canonical bytes.

    digest: of the bytes, made where the record is, beside the one thread that writes.
    """

    record: Record
    payload: bytes
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest(self.payload))


@dataclass(frozen=True, slots=True)
class Refused:
    """A record that does not, and why. side: empty where not even that can be told."""

    side: Side | Literal[""]
    code: str
    detail: str


class Observer(Protocol):
    """Hears of what became durable."""

    def step_changed(self, run_id: str, step: int, totals: Totals, gained: Totals) -> None:
        """A step has new totals; gained: what they grew by."""

    def run_returned(self, run_id: str) -> None:
        """A run that had left reports again; its counters have started at 0."""

    def side_heard(self, run_id: str, side: str, step: int, at: float) -> None:
        """A side has reported up to `step`, at Unix seconds `at`."""


class Pipeline:
    """What the auditor does with records, apart from wires, disks and processes.

    policy: which agreeing samples to recompute. recompute: hands a sample to the reference, the urgent ones first;
    None where there is no reference, and mismatches stay without a side. room: whether one more sample, urgent or not,
    may wait for the reference beside so many that the same transaction has handed over already. on_fault: told of each
    sample that could not be judged (`judge`), or whose causes could not be looked for (`causes`), and the code.
    searches: what of the mismatches that the reference has spoken on is searched for causes; None: nothing is.
    """

    def __init__(
        self,
        contracts: Contracts,
        policy: Policy,
        observer: Observer,
        recompute: Callable[[SampleKey, bool], None] | None,
        room: Callable[[bool, int], bool] = lambda urgent, asked: True,
        on_fault: Callable[[str, str], None] = lambda part, code: None,
        searches: SearchQueue | None = None,
    ) -> None:
        self._contracts = contracts
        self._policy = policy
        self._observer = observer
        self._recompute = recompute
        self._room = room
        self._on_fault = on_fault
        self._searches = searches

    def receive(self, unit: Unit, batch: Sequence[Incoming | Refused]) -> list[Receipt]:
        """Store a batch and judge the samples that it completes; one receipt a record, in order."""
        gained: dict[tuple[str, int], list[Totals]] = defaultdict(list)
        self._begin_runs(unit, {item.record.run_id for item in batch if isinstance(item, Incoming)})
        receipts = [
            self._refuse(unit, item) if isinstance(item, Refused) else self._take(unit, item, gained) for item in batch
        ]
        self._add_to_steps(unit, gained)
        self._note_sides(unit, [item.record for item in batch if isinstance(item, Incoming)])
        return receipts

    def conclude(self, unit: Unit, key: SampleKey, outcome: ReferenceLogprobs | RecomputeError) -> None:
        """Take in what the reference said of a sample; said again, it changes nothing."""
        before = unit.judgement(key)
        if before is None or before.reference is not Reference.QUEUED:
            return
        try:
            after = self._concluded(unit, key, before, outcome)
        except EvidenceError as error:  # since it was read for the reference
            after = self._concluded(unit, key, before, RecomputeError(str(error), error.code))
        self._rejudge(unit, key, before, after)

    def _concluded(
        self, unit: Unit, key: SampleKey, before: Judgement, outcome: ReferenceLogprobs | RecomputeError
    ) -> Judgement:
        if isinstance(outcome, RecomputeError):
            unit.count("recompute_errors", run_id=key.run_id, code=outcome.code)
            return replace(
                self._without_reference(unit, key, before),
                reference=Reference.FAILED,
                reference_error=f"{outcome.code}: {outcome}",
            )
        rollout, trainer = self._pair(unit, key)
        after = self._hand_on(unit, key, judge_with_reference(before, rollout, trainer, outcome))
        unit.keep_reference(key, outcome.rollout)
        self._count_reference(unit, key, after)
        return after

    def explain(self, unit: Unit, key: SampleKey, causes: tuple[dict[str, Any], ...] | None, why: str = "") -> None:
        """Take in what a search for causes found, or None where it failed, and why; said again, it changes nothing."""
        before = unit.judgement(key)
        if before is not None and before.cause == SEARCHING:
            self._rejudge(unit, key, before, with_causes(before, causes, why))

    def _rejudge(self, unit: Unit, key: SampleKey, before: Judgement, after: Judgement) -> None:
        self._count_final(unit, key, after)
        unit.judge(key, after)
        self._add_to_steps(unit, {(key.run_id, key.step): change(before, after, NOTHING)})

    def give_up(self, unit: Unit, keys: Sequence[SampleKey]) -> None:
        """Judge samples whose other side has not come in time. One that came meanwhile is left alone."""
        gained: dict[tuple[str, int], list[Totals]] = defaultdict(list)
        for key in keys:
            before = unit.judgement(key)
            if before is None or before.verdict is not Verdict.PENDING:
                continue
            after = given_up(before)
            unit.count("unpaired_samples", run_id=key.run_id, side=before.missing)
            unit.judge(key, after)
            gained[key.run_id, key.step].extend(change(before, after, NOTHING))
        self._add_to_steps(unit, gained)

    def _take(self, unit: Unit, item: Incoming, gained: dict[tuple[str, int], list[Totals]]) -> Receipt:
        record, key = item.record, item.record.key
        held = unit.held(key)
        try:
            stored = unit.add_record(key, record.side, Held(item.digest, item.payload, record), held)
        except ConflictError as error:
            return self._refuse(unit, Refused(record.side, error.code, str(error)), key.run_id)
        unit.count("records", run_id=key.run_id, side=record.side, outcome=stored.value)
        if stored is Stored.DUPLICATE:
            return Receipt("duplicate")
        # Without the other side nothing can have been judged.
        before = unit.judgement(key) if held else None
        judged = self._judge(unit, record, held.get(_OTHER[record.side]), before)
        if judged.judgement != before:
            unit.judge(key, judged.judgement)
        gained[key.run_id, key.step].extend(change(before, judged.judgement, judged.drift))
        return Receipt("accepted")

    def _judge(self, unit: Unit, record: Record, other: Held | None, before: Judgement | None) -> PairJudgement:
        waited_in_vain = before is not None and before.condition == MISSING_SIDE
        if other is not None and not other.retired:
            if waited_in_vain:
                unit.count("late_samples", run_id=record.run_id, side=record.side)
        elif before is not None and waited_in_vain:
            return PairJudgement(before, None)  # what it would be compared with has been retired since
        else:
            return PairJudgement(pending(_OTHER[record.side], record.weight_version), None)
        # The record is sound and stays; that the auditor could not judge it must be visible, not refused.
        try:
            rollout, trainer = _ordered(record, other.decoded())
            pair = judge_pair(rollout, trainer, self._contracts)
        except RecordError as error:
            why = f"the stored {_OTHER[record.side]} record: {error}"
            log.error("sample %s cannot be judged: %s", record.key, why)
            return self._not_judged(unit, EvidenceError.code, why)
        except Exception as error:
            log.exception("sample %s could not be judged", record.key)
            return self._not_judged(unit, AuditorError.code, repr(error))
        return self._count_pair(unit, rollout, trainer, pair)

    def _not_judged(self, unit: Unit, code: str, why: str) -> PairJudgement:
        unit.after_commit.append(partial(self._on_fault, "judge", code))
        return PairJudgement(Judgement(Verdict.ERROR, reference_error=f"{code}: {why}"), None)

    def _count_pair(
        self, unit: Unit, rollout: RolloutRecord, trainer: TrainerRecord, pair: PairJudgement
    ) -> PairJudgement:
        key, judgement, comparison = rollout.key, pair.judgement, pair.comparison
        if comparison is None:
            unit.count("not_comparable_samples", run_id=key.run_id, condition=judgement.condition)
            return pair
        _count_tokens(unit, key.run_id, judgement, comparison)
        judgement = self._hand_over(unit, judgement, rollout)
        if judgement.reference is not Reference.QUEUED:
            judgement = self._with_causes(unit, judgement, rollout, trainer)
        self._count_final(unit, key, judgement)
        return PairJudgement(judgement, comparison)

    def _with_causes(
        self, unit: Unit, judgement: Judgement, rollout: RolloutRecord, trainer: TrainerRecord
    ) -> Judgement:
        """Causes read off the two sides alone, for a mismatch on which the reference has no say."""
        if judgement.verdict is not Verdict.MISMATCH:
            return judgement
        try:
            with np.errstate(all="ignore"):  # what a broken side reports may overflow anything
                causes = diagnose_pair(rollout, trainer)
        except Exception:
            # The records are sound: their batch must not fail for a guess, nor be sent again for ever.
            log.exception("causes of %s were not found", rollout.key)
            unit.after_commit.append(partial(self._on_fault, "causes", AuditorError.code))
            return with_causes(judgement, None)
        return with_causes(judgement, tuple(cause.to_json() for cause in causes))

    def _without_reference(self, unit: Unit, key: SampleKey, judgement: Judgement) -> Judgement:
        """As above; what cannot be read has no causes."""
        try:
            return self._with_causes(unit, judgement, *self._pair(unit, key))
        except RecordError:
            return judgement

    def _hand_over(self, unit: Unit, judgement: Judgement, rollout: RolloutRecord) -> Judgement:
        """Ask the reference about a mismatch or a sample that the policy chose, where there is room for it to wait."""
        key, mismatch, ask = rollout.key, judgement.verdict is Verdict.MISMATCH, self._recompute
        if ask is None or not (mismatch or self._policy.wants(_candidate(rollout))):
            return judgement
        if not self._room(mismatch, unit.asked):
            unit.count("recompute_skipped_samples", run_id=key.run_id, chosen="mismatch" if mismatch else "sampled")
            return replace(judgement, reference=Reference.SKIPPED)
        unit.asked += 1
        unit.after_commit.append(lambda: ask(key, mismatch))
        return replace(judgement, reference=Reference.QUEUED)

    def _hand_on(self, unit: Unit, key: SampleKey, judgement: Judgement) -> Judgement:
        """Have the causes of a mismatch searched for, where there is room: the verdict stands and waits for none."""
        searches = self._searches
        if judgement.side is Faulty.NONE or searches is None or not searches.wants(key):
            return judgement
        unit.after_commit.append(lambda: searches.put(key, urgent=False))
        return replace(judgement, cause=SEARCHING)

    def _count_reference(self, unit: Unit, key: SampleKey, judgement: Judgement) -> None:
        unit.count("recomputed_tokens", judgement.compared, run_id=key.run_id, mma=judgement.reference_mma)
        for side, differing in (("rollout", judgement.rollout_differing), ("trainer", judgement.trainer_differing)):
            if differing:
                unit.count("mismatched_tokens", differing, run_id=key.run_id, side=side)

    def _count_final(self, unit: Unit, key: SampleKey, judgement: Judgement) -> None:
        """Count a mismatched sample once, when its side and cause are known or nobody will say them."""
        undecided = judgement.reference is Reference.QUEUED or judgement.cause == SEARCHING
        if undecided or judgement.verdict is not Verdict.MISMATCH:
            return
        explained = judgement.explained_by_arithmetic
        side = Faulty.NONE if explained else judgement.side
        cause = _ARITHMETIC if explained else judgement.cause or UNKNOWN
        unit.count("mismatched_samples", run_id=key.run_id, side=side.value, cause=cause)

    def _refuse(self, unit: Unit, refused: Refused, run_id: str = "") -> Receipt:
        unit.count("records", run_id=run_id, side=refused.side, outcome="refused")
        unit.count("refusals", code=refused.code)
        return Receipt("refused", refused.code, refused.detail)

    def _add_to_steps(self, unit: Unit, gained: Mapping[tuple[str, int], list[Totals]]) -> None:
        for (run_id, step), parts in gained.items():
            totals = Totals.of(parts)
            new = unit.add_to_step(run_id, step, totals)
            unit.after_commit.append(_tell(self._observer, run_id, step, new, totals))

    def _begin_runs(self, unit: Unit, runs: Collection[str]) -> None:
        """Start the counters of runs that are new, or that had left the exposition."""
        for run_id in runs:
            if unit.has_counter("compared_tokens", run_id=run_id):
                continue
            _start_counters(unit, run_id)
            if unit.last_heard(run_id) is not None:
                unit.after_commit.append(partial(self._observer.run_returned, run_id))

    def _note_sides(self, unit: Unit, records: Sequence[Record]) -> None:
        newest: dict[tuple[str, Side], int] = {}
        for record in records:
            name = (record.run_id, record.side)
            newest[name] = max(newest.get(name, 0), record.step)
        for (run_id, side), step in newest.items():
            unit.heard_from(run_id, side, step)
            unit.after_commit.append(_tell_side(self._observer, run_id, side, step, unit.now))

    def _pair(self, unit: Unit, key: SampleKey) -> tuple[RolloutRecord, TrainerRecord]:
        rollout, trainer = unit.with_content(key, "rollout"), unit.with_content(key, "trainer")
        assert rollout is not None, f"the rollout record of {key} is gone while its reference is queued"
        assert trainer is not None, f"the trainer record of {key} is gone while its reference is queued"
        return _ordered(rollout.decoded(), trainer.decoded())


def _tell(observer: Observer, run_id: str, step: int, totals: Totals, gained: Totals) -> Callable[[], None]:
    return lambda: observer.step_changed(run_id, step, totals, gained)


def _tell_side(observer: Observer, run_id: str, side: Side, step: int, at: float) -> Callable[[], None]:
    return lambda: observer.side_heard(run_id, side, step, at)


def _candidate(rollout: RolloutRecord) -> Candidate:
    return Candidate(rollout.key, rollout.engine_id, rollout.response_len)


def _ordered(one: Record, other: Record) -> tuple[RolloutRecord, TrainerRecord]:
    match one, other:
        case (RolloutRecord(), TrainerRecord()):
            return one, other
        case (TrainerRecord(), RolloutRecord()):
            return other, one
        case _:
            raise RecordError(f"two records of {one.key} are of one side")


def _start_counters(unit: Unit, run_id: str) -> None:
    """Counters that an alert looks at start at 0 with the run: a series that first appears at 5 has never increased."""
    unit.count("compared_tokens", 0, run_id=run_id)
    for side in ("pair", "rollout", "trainer"):
        unit.count("mismatched_tokens", 0, run_id=run_id, side=side)
    for side in ("rollout", "trainer"):
        unit.count("nonfinite_logprobs", 0, run_id=run_id, side=side)
    for condition in Condition:
        unit.count("not_comparable_samples", 0, run_id=run_id, condition=condition.value)


def _count_tokens(unit: Unit, run_id: str, judgement: Judgement, comparison: Comparison) -> None:
    unit.count("compared_tokens", judgement.compared, run_id=run_id)
    if judgement.differing and judgement.same_arithmetic:
        unit.count("mismatched_tokens", judgement.differing, run_id=run_id, side="pair")
    if judgement.differing and not judgement.same_arithmetic:
        unit.count("other_arithmetic_tokens", judgement.differing, run_id=run_id)
    for side, count in (("rollout", comparison.nonfinite_rollout), ("trainer", comparison.nonfinite_trainer)):
        if count:
            unit.count("nonfinite_logprobs", count, run_id=run_id, side=side)
    edges = [*(str(edge) for edge in ULP_EDGES), "+Inf"]
    for edge, count in zip(edges, comparison.ulp_counts, strict=True):
        if count:
            unit.count("ulp_diff_bucket", count, run_id=run_id, le=edge)
    unit.count("ulp_diff_sum", comparison.ulp_sum, run_id=run_id)
