"""Bits decide, the reference says which side; tables of every outcome."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.compare import ULP_EDGES, compare_logprobs
from auditor.drift import NOTHING, drift_sums, statistics
from auditor.export.views import capsule_view, counts
from auditor.judge import Faulty, Judgement, Reference, ReferenceLogprobs, Verdict, judge_pair, judge_with_reference
from auditor.records import Environment, SampleKey
from auditor.storage.rows import SampleRow, Totals, change
from rl_kernel.compare import compare_bits, ulp_distance
from rl_kernel.contract import ModelContract, Profile
from tests.auditor.samples import CONTRACT, CONTRACTS, one_ulp_off, pair, with_logprobs


def test_equal_bits_are_a_match_and_one_bit_is_a_mismatch() -> None:
    rollout, trainer = pair()
    assert judge_pair(rollout, trainer, CONTRACTS).judgement.verdict is Verdict.MATCH
    judgement = judge_pair(rollout, one_ulp_off(trainer), CONTRACTS).judgement
    assert judgement.verdict is Verdict.MISMATCH
    assert judgement.side is Faulty.UNKNOWN
    assert (judgement.compared, judgement.differing, judgement.first_index, judgement.max_ulp) == (32, 1, 5, 1)
    bits = struct.unpack(">I", bytes.fromhex(judgement.rollout_bits))[0]
    assert bits == int(rollout.logprobs.view(np.uint32)[5])
    assert judgement.rollout_bits != judgement.trainer_bits


def test_minus_zero_is_not_plus_zero() -> None:
    rollout, trainer = pair()
    judged = judge_pair(with_logprobs(rollout, 3, 0.0), with_logprobs(trainer, 3, -0.0), CONTRACTS).judgement
    assert (judged.verdict, judged.differing, judged.max_abs) == (Verdict.MISMATCH, 1, 0.0)


def change_of(judgement: Judgement) -> Totals:
    return Totals.of(change(None, judgement, NOTHING))


@pytest.mark.parametrize("trainers", [np.nan, np.inf, 0.0])
def test_a_sample_without_two_finite_values_is_not_said_to_be_apart_by_0(trainers: float) -> None:
    rollout, trainer = pair()
    wrong = replace(rollout, logprobs=np.full_like(rollout.logprobs, np.nan))
    other = replace(trainer, logprobs=np.full_like(trainer.logprobs, trainers))
    judged = judge_pair(wrong, other, CONTRACTS).judgement
    assert (judged.max_abs, judged.max_ulp) == (None, None)
    same = judge_pair(wrong, replace(trainer, logprobs=wrong.logprobs), CONTRACTS).judgement
    assert (same.verdict, same.max_abs, same.max_ulp) == (Verdict.MATCH, None, None)
    row = SampleRow(SampleKey("run", 0, "0"), Judgement.from_json(json.loads(json.dumps(judged.to_json()))))
    assert (capsule_view(row).max_abs, capsule_view(row).max_ulp) == (None, None)
    totals = counts(change_of(judged))
    assert (totals["max_abs"], totals["max_ulp"], totals["compared_tokens"]) == (None, None, 32)
    older = {**judged.to_json(), "max_abs": 0.0, "max_ulp": 0}
    assert change_of(Judgement.from_json(older)) == change_of(judged), "an older ledger no longer verifies"


@pytest.mark.parametrize(
    ("rollouts", "trainers", "apart"),
    [(-np.inf, -np.inf, False), (-np.inf, np.nan, False), (-np.inf, np.inf, True), (-np.inf, -1.0, True)],
)
def test_a_sample_and_its_step_say_the_same_of_infinities(rollouts: float, trainers: float, apart: bool) -> None:
    rollout, trainer = (
        replace(record, logprobs=np.full_like(record.logprobs, value))
        for record, value in zip(pair(), (rollouts, trainers), strict=True)
    )
    judged = judge_pair(rollout, trainer, CONTRACTS)
    totals = counts(Totals.of(change(None, judged.judgement, judged.drift)))
    assert (judged.judgement.max_abs, totals["max_abs"]) == (None, None)
    assert judged.judgement.max_ulp == totals["max_ulp"]
    assert (judged.judgement.max_ulp is not None) == apart


def test_a_nan_is_counted_and_never_becomes_zero() -> None:
    rollout, trainer = pair()
    one_sided = judge_pair(with_logprobs(rollout, 3, np.nan), trainer, CONTRACTS)
    assert one_sided.judgement.verdict is Verdict.MISMATCH
    assert (one_sided.judgement.nonfinite_rollout, one_sided.judgement.nonfinite_trainer) == (1, 0)
    assert (one_sided.drift.tokens, one_sided.drift.nonfinite) == (31, 1)
    same = judge_pair(with_logprobs(rollout, 3, np.nan), with_logprobs(trainer, 3, np.nan), CONTRACTS).judgement
    assert (same.verdict, same.nonfinite_rollout, same.nonfinite_trainer) == (Verdict.MATCH, 1, 1)


def test_a_token_outside_the_mask_is_not_compared() -> None:
    rollout, trainer = pair()
    mask = np.arange(32) != 5
    off = one_ulp_off(replace(trainer, mask=mask), 5)
    judged = judge_pair(replace(rollout, mask=mask), off, CONTRACTS).judgement
    assert (judged.verdict, judged.compared) == (Verdict.MATCH, 31)


def test_the_first_index_counts_masked_tokens_too() -> None:
    rollout, trainer = pair()
    mask = np.arange(32) >= 4
    judged = judge_pair(replace(rollout, mask=mask), one_ulp_off(replace(trainer, mask=mask), 9), CONTRACTS).judgement
    assert judged.first_index == 9


@pytest.mark.parametrize(
    ("rollout_off", "trainer_off", "verdict", "side"),
    [
        (False, False, Verdict.MATCH, Faulty.NONE),
        (True, False, Verdict.MISMATCH, Faulty.ROLLOUT),
        (False, True, Verdict.MISMATCH, Faulty.TRAINER),
        (True, True, Verdict.MISMATCH, Faulty.BOTH),
    ],
)
def test_the_reference_names_the_side(rollout_off: bool, trainer_off: bool, verdict: Verdict, side: Faulty) -> None:
    rollout, trainer = pair()
    truth = rollout.logprobs
    rollout = one_ulp_off(rollout, 4) if rollout_off else rollout
    trainer = one_ulp_off(trainer, 6) if trainer_off else trainer
    before = judge_pair(rollout, trainer, CONTRACTS).judgement
    after = judge_with_reference(before, rollout, trainer, ReferenceLogprobs(truth, truth, "fma32"))
    assert (after.verdict, after.side, after.reference) == (verdict, side, Reference.DONE)
    assert (after.rollout_differing, after.trainer_differing) == (rollout_off, trainer_off)
    assert after.reference_differing == rollout_off + trainer_off


def test_two_sides_that_agree_with_each_other_can_both_be_wrong() -> None:
    rollout, trainer = pair()
    truth = one_ulp_off(rollout, 2).logprobs
    before = judge_pair(rollout, trainer, CONTRACTS).judgement
    assert before.verdict is Verdict.MATCH
    after = judge_with_reference(before, rollout, trainer, ReferenceLogprobs(truth, truth, "fma32"))
    assert (after.verdict, after.side, after.reference_differing) == (Verdict.MISMATCH, Faulty.BOTH, 1)


def test_a_trainer_that_reports_the_rollouts_values_is_found_by_the_reference_where_every_drift_is_zero() -> None:
    rollout, trainer = pair()
    rollout = one_ulp_off(rollout, 2)
    trainer = replace(trainer, logprobs=rollout.logprobs.copy())
    drift = statistics(drift_sums(rollout.logprobs, trainer.logprobs, rollout.mask))
    assert (drift.mean_abs_diff, drift.k3, drift.ratio_max) == (0.0, 0.0, 1.0)
    before = judge_pair(rollout, trainer, CONTRACTS).judgement
    truth = pair()[0].logprobs
    after = judge_with_reference(before, rollout, trainer, ReferenceLogprobs(truth, truth, "fma32"))
    assert (before.verdict, after.verdict, after.side) == (Verdict.MATCH, Verdict.MISMATCH, Faulty.BOTH)


def test_a_difference_between_two_arithmetics_is_explained_when_each_side_keeps_to_its_own() -> None:
    other = ModelContract(Profile("other", "cdna3", "poly"), CONTRACT.segments, CONTRACT.ops)
    contracts = {**CONTRACTS, other.digest(): other}
    rollout, trainer = pair()
    trainer = one_ulp_off(
        replace(trainer, contract_digest=other.digest(), environment=Environment("rocm-gfx942", "cdna3", "cc" * 32))
    )
    before = judge_pair(rollout, trainer, contracts).judgement
    assert (before.verdict, before.same_arithmetic) == (Verdict.MISMATCH, False)
    own = ReferenceLogprobs(rollout.logprobs, trainer.logprobs, "fma32,cdna3")
    after = judge_with_reference(before, rollout, trainer, own)
    assert (after.side, after.explained_by_arithmetic) == (Faulty.NONE, True)
    wrong = ReferenceLogprobs(rollout.logprobs, one_ulp_off(trainer, 8).logprobs, "fma32,cdna3")
    after = judge_with_reference(before, rollout, trainer, wrong)
    assert (after.side, after.explained_by_arithmetic) == (Faulty.TRAINER, False)


def test_a_judgement_survives_json() -> None:
    judgement = judge_pair(*pair(), CONTRACTS).judgement
    assert Judgement.from_json(judgement.to_json()) == judgement


floats = st.floats(width=32, allow_nan=False)


@given(floats, floats)
def test_an_ulp_distance_of_zero_means_equal_bits(a: float, b: float) -> None:
    left, right = np.array([a], np.float32), np.array([b], np.float32)
    assert (int(ulp_distance(left, right)[0]) == 0) == (left.tobytes() == right.tobytes())


def test_ulp_distances_worked_out_by_hand() -> None:
    ulps = [np.float32(1.0), np.nextafter(np.float32(1.0), np.float32(2.0)), np.float32(0.0), np.float32(-0.0)]
    left = np.array([ulps[0], ulps[2], ulps[3], ulps[0]], np.float32)
    right = np.array([ulps[1], ulps[3], np.nextafter(np.float32(0), np.float32(1)), np.float32(2.0)], np.float32)
    assert ulp_distance(left, right).tolist() == [1, 1, 2, 1 << 23]


@given(st.lists(st.tuples(floats, floats), min_size=1, max_size=50))
def test_the_histogram_has_every_number_once(values: list[tuple[float, float]]) -> None:
    left, right = (np.array(side, np.float32) for side in zip(*values, strict=True))
    found = compare_logprobs(left, right, np.ones(len(left), np.bool_))
    assert sum(found.ulp_counts) == len(values)
    assert found.ulp_counts[0] == len(values) - found.difference.differing
    assert len(found.ulp_counts) == len(ULP_EDGES) + 1


@given(st.lists(st.one_of(st.floats(width=32), st.just(-0.0)), min_size=1, max_size=40), st.integers(0, 2**40 - 1))
def test_equal_sides_are_summed_up_as_any_others(values: list[float], bits: int) -> None:
    """The short way for equal bits says what the long way says, NaNs and infinities too."""
    side = np.array(values, np.float32)
    active = np.array([bits >> i & 1 for i in range(len(values))], np.bool_)
    short = compare_logprobs(side, side.copy(), active)
    kept = np.ascontiguousarray(side[active])
    assert short.drift == drift_sums(side, side, active)
    assert short.difference == compare_bits(kept, kept)
    assert short.ulp_counts == (int((~np.isnan(kept)).sum()),) + (0,) * len(ULP_EDGES)
    assert short.nonfinite_rollout == short.nonfinite_trainer == int((~np.isfinite(kept)).sum())
