"""Causes: each is found on the fault that makes it, none where nothing differs, and scores mean what they say."""

from dataclasses import replace

import numpy as np
import pytest

from auditor.causes.evidence import CERTAIN, IN_PART, SETTLED, STRONG, Evidence, Suggestion, explained
from auditor.causes.sample import Weights, diagnose_pair, diagnose_sample
from auditor.causes.table import COMPUTED, READ, diagnose, ranked
from auditor.faults.declared import DECLARED
from auditor.faults.held_out import FOURTH
from auditor.faults.matrix import SUITE, flagged_clean, outcomes
from auditor.faults.reported import THIRD
from auditor.faults.strangers import FIRST, SECOND
from auditor.faults.suite import FAULTS
from auditor.faults.world import VERSIONS, World
from auditor.judge import ReferenceLogprobs
from tests.auditor.samples import RESPONSE, one_ulp_off, pair, with_logprobs

ALL = np.ones(8, np.bool_)


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


TRUTH = row(-1, -2, -3, -1, -2, -3, -1, -2)


def test_a_prediction_right_in_every_bit_is_certain() -> None:
    found = TRUTH + np.float32(0.5)
    assert explained(found, TRUTH, found, ALL) == CERTAIN


def test_a_single_differing_token_is_settled_and_not_certain() -> None:
    found = TRUTH.copy()
    found[3] = -1.5
    assert explained(found, TRUTH, found, ALL) == SETTLED


def test_a_last_bit_of_one_value_settles_nothing_and_few_values_resemble_nothing() -> None:
    found = TRUTH.copy()
    found[3] = np.nextafter(found[3], np.float32(0))
    assert explained(found, TRUTH, np.where(ALL, found, TRUTH), ALL) == SETTLED  # all values are as predicted
    also = found.copy()
    also[5] += np.float32(0.5)
    assert explained(found, TRUTH, also, ALL) == STRONG
    wide = TRUTH + row(1, -1, 0, 1, 0, -1, 1, -1)
    near = wide + row(0.1, 0, -0.1, 0, 0.1, 0, 0, 0)
    assert explained(wide, TRUTH, near, ALL) > 0.5
    assert explained(wide, TRUTH, near, np.arange(8) < 7) == 0.0


def test_last_bits_of_few_values_are_chance_where_the_prediction_moves_many_more() -> None:
    found = TRUTH.copy()
    found[2] = np.nextafter(found[2], np.float32(0))
    many = np.where(np.arange(8) == 2, found, TRUTH + np.float32(1))
    assert explained(found, TRUTH, many, ALL) == 0.0


def test_a_part_of_zeros_does_not_settle_what_made_them() -> None:
    """As a token that was never scored, and a softmax in few bits in which it would have a chance of 1."""
    found = TRUTH.copy()
    found[5:7] = 0.0
    predicted = np.where(found == 0.0, found, TRUTH + np.float32(0.01))
    assert explained(found, TRUTH, predicted, ALL) < STRONG
    assert explained(found, TRUTH, found, ALL) == CERTAIN


def test_a_prediction_that_takes_away_half_of_the_difference_gets_half_of_strong() -> None:
    found = TRUTH + np.float32(1.0)
    assert explained(found, TRUTH, TRUTH + np.float32(0.5), ALL) == STRONG * 0.5


def test_a_prediction_right_wherever_the_side_is_wrong_explains_a_fault_of_a_part() -> None:
    """As a temperature that is applied to half of a response."""
    predicted = TRUTH + np.float32(0.5)
    found = np.concatenate([predicted[:4], TRUTH[4:]])
    assert explained(found, TRUTH, predicted, ALL) == IN_PART
    found[3] -= np.float32(0.25)
    assert explained(found, TRUTH, predicted, ALL) < STRONG


def test_a_constant_is_near_everything_and_explains_nothing() -> None:
    found = TRUTH * np.float32(0.1) - np.float32(5.0)
    assert explained(found, TRUTH, np.full(8, found.mean(), np.float32), ALL) == 0.0


def test_nothing_is_explained_where_nothing_differs() -> None:
    assert explained(TRUTH, TRUTH, TRUTH + np.float32(1), ALL) == 0.0
    assert diagnose_pair(*pair()) == ()


def test_suggestions_are_ranked_and_each_cause_is_said_once() -> None:
    said = [Suggestion("a", 0.4, "weak"), Suggestion("b", 0.6, ""), Suggestion("a", 0.9, "strong")]
    assert [(s.cause, s.score) for s in ranked(said)] == [("a", 0.9), ("b", 0.6)]


def test_without_a_reference_causes_are_read_off_the_two_sides() -> None:
    rollout, trainer = pair()
    assert diagnose_pair(with_logprobs(rollout, 31, 0.0), trainer)[0].cause == "filler"
    rolled = replace(rollout, logprobs=np.roll(rollout.logprobs, 1))
    assert diagnose_pair(rolled, trainer)[0].cause == "off_by_one"
    assert diagnose_pair(one_ulp_off(rollout), trainer)[0].cause == "reduction_order"


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=11)


def test_nine_in_ten_injected_faults_get_a_right_cause_first_and_none_is_missed(world: World) -> None:
    found = list(outcomes(SUITE, world, each=1))
    assert len(found) == len(FAULTS) + 1 + len(DECLARED)
    assert [outcome.fault for outcome in found if outcome.missed] == []
    wrong = [(outcome.fault, outcome.first) for outcome in found if not outcome.correct]
    assert len(wrong) <= 0.1 * len(found), wrong
    assert [outcome.fault for outcome in found if outcome.named != outcome.side] == []


def test_faults_that_no_cause_was_written_for_are_never_missed_and_mostly_named(world: World) -> None:
    """The second list was only counted when it was first tried; docs/results says how it fared then.

    Every second one; all of them in the soak test below.
    """
    found = list(outcomes((*FIRST, *SECOND)[::2], world, each=1))
    assert [outcome.fault for outcome in found if outcome.missed or outcome.named != outcome.side] == []
    wrong = [(outcome.fault, outcome.first) for outcome in found if not outcome.correct]
    assert len(wrong) <= 0.15 * len(found), wrong


def test_faults_that_users_reported_are_never_missed_and_mostly_named(world: World) -> None:
    """Every third of them; all of them in the soak test below."""
    found = list(outcomes(THIRD[::3], world, each=1))
    assert [outcome.fault for outcome in found if outcome.missed or outcome.named != outcome.side] == []
    wrong = [(outcome.fault, outcome.first) for outcome in found if not outcome.correct]
    assert len(wrong) <= 0.15 * len(found) + 1, wrong  # what a neighbour in the batch said can be known by nobody


@pytest.mark.soak
def test_all_reported_faults_are_mostly_named_and_those_held_out_never_missed(world: World) -> None:
    strangers = list(outcomes((*FIRST, *SECOND), world, each=1))
    assert sum(outcome.correct for outcome in strangers) >= 0.85 * len(strangers)
    found = list(outcomes(THIRD, world, each=4))
    assert sum(outcome.correct for outcome in found) >= 0.9 * len(found)
    held_out = list(outcomes(FOURTH, world, each=4))
    assert [o.fault for o in (*strangers, *found, *held_out) if o.missed or o.named != o.side] == []


def test_a_number_that_stands_for_what_is_missing_is_told_from_a_limit() -> None:
    rollout, trainer = pair()
    missing = rollout.logprobs.copy()
    missing[[3, 9, 20]] = -9999.0
    assert diagnose_pair(replace(rollout, logprobs=missing), trainer)[0].cause == "filler"
    limited = np.maximum(rollout.logprobs, np.float32(np.quantile(rollout.logprobs, 0.3)))
    assert diagnose_pair(replace(rollout, logprobs=limited), trainer)[0].cause == "value_transform"


def test_a_response_s_own_values_in_another_order_are_told_from_a_shift() -> None:
    rollout, trainer = pair()
    right, half = rollout.logprobs, RESPONSE // 2
    again = diagnose_pair(replace(rollout, logprobs=np.concatenate([right[:half], right[:half]])), trainer)
    assert (again[0].cause, again[0].score) == ("value_order", CERTAIN)
    # 40 tokens in four slices of ten, of which the last two come the other way round.
    slices = np.concatenate([right[:12], right[22:], right[12:22]])
    assert diagnose_pair(replace(rollout, logprobs=slices), trainer)[0].cause == "context_parallel"
    assert diagnose_pair(replace(rollout, logprobs=np.roll(right, 1)), trainer)[0].cause == "off_by_one"


def test_a_number_added_to_every_probability_is_told_from_one_added_to_every_value() -> None:
    rollout, trainer = pair()
    shifted = diagnose_pair(replace(rollout, logprobs=rollout.logprobs + np.float32(0.5)), trainer)[0]
    assert shifted.cause == "value_transform"
    assert "+0.5 is added to every value" in shifted.evidence
    smoothed = np.log(np.exp(rollout.logprobs.astype(np.float64)) + 1e-3).astype(np.float32)
    said = diagnose_pair(replace(rollout, logprobs=smoothed), trainer)[0]
    assert said.cause == "value_transform"
    assert "+0.001 is added to every probability" in said.evidence


def test_no_clean_sample_is_flagged(world: World) -> None:
    assert flagged_clean(world, 100) == 0


@pytest.mark.slow
def test_no_clean_sample_of_a_thousand_is_flagged() -> None:
    assert flagged_clean(World(None, seed=3), 1000) == 0


def test_every_suggestion_comes_with_evidence_and_a_score(world: World) -> None:
    (sample,) = world.draw(1, 20, 40)
    decoder = world.decoder(sample.version)
    rollout, trainer = world.records(sample)
    stale = replace(rollout, logprobs=world.logprobs(world.decoder(sample.version - 1), sample))
    reference = ReferenceLogprobs(trainer.logprobs, trainer.logprobs, "fma32")
    weights = Weights(decoder, range(1, VERSIONS + 1), world.decoder)
    suggestions = diagnose_sample(stale, trainer, reference, weights)
    assert suggestions[0].cause == "stale_weights"
    for suggestion in suggestions:
        assert 0.0 < suggestion.score <= 1.0
        assert any(character.isdigit() for character in suggestion.evidence)


def test_a_spent_budget_leaves_what_was_read(world: World) -> None:
    (sample,) = world.draw(1, 20, 40)
    decoder = world.decoder(sample.version)
    rollout, trainer = world.records(sample)
    stale = replace(rollout, logprobs=world.logprobs(world.decoder(sample.version - 1), sample))
    reference = ReferenceLogprobs(trainer.logprobs, trainer.logprobs, "fma32")
    weights = Weights(decoder, range(1, VERSIONS + 1), world.decoder)
    suggestions = diagnose_sample(stale, trainer, reference, weights, budget=0)
    assert "stale_weights" not in {suggestion.cause for suggestion in suggestions}


def test_every_cause_in_the_table_says_nothing_of_equal_sides(world: World) -> None:
    rollout, trainer = pair()
    evidence = Evidence(rollout.logprobs, rollout.logprobs, rollout.mask, rollout, rollout, trainer)
    assert diagnose(evidence, None) == ()
    assert len(READ) + len(COMPUTED) >= 15
    for read in READ:
        assert list(read(evidence)) == [], read.__name__
