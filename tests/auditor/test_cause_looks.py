"""What is read off the values alone: numbers that nobody computed, and what a difference looks like."""

from dataclasses import replace

import numpy as np
import pytest

from auditor.causes.context.kv import lost_blocks
from auditor.causes.distribution.softmax import _can_be, _foretells, tokens_forbidden
from auditor.causes.evidence import SETTLED, Evidence
from auditor.causes.patterns import trend
from auditor.causes.table import diagnose
from auditor.causes.values.filler import filler
from auditor.causes.values.transform import value_transform
from auditor.compare import Logprobs
from auditor.faults.world import Drawn, World
from tests.auditor.diagnosis import evidence_of, oracle_of


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=5)


def right(world: World, sample: Drawn) -> Evidence:
    return evidence_of(world, sample, world.logprobs(world.decoder(sample.version), sample))


def put(evidence: Evidence, at: list[int], truth: float, found: float) -> Evidence:
    values, sides = (evidence.truth.copy(), evidence.found.copy())
    values[at], sides[at] = truth, found
    return replace(evidence, truth=values, found=sides)


def test_all_zeros_are_a_filler_where_nothing_else_is_wrong(world: World, sample: Drawn) -> None:
    """Also the one that the model is so sure of that a temperature would make 0 of it."""
    evidence = put(put(right(world, sample), [70], -4e-6, 0.0), [71], -0.5, 0.0)
    (said,) = filler(evidence)
    assert said.score == 0.9
    moved = replace(evidence, found=np.where(evidence.found == 0.0, 0.0, evidence.found - 0.1).astype(np.float32))
    assert not list(filler(moved))


def test_what_sure_rows_share_by_chance_is_no_filler(world: World, sample: Drawn) -> None:
    moved = right(world, sample)
    moved = replace(moved, found=(moved.found - np.float32(0.1)).astype(np.float32))
    assert not list(filler(put(moved, [3, 9, 20], -2e-6, -3.814697e-06)))
    assert list(filler(put(moved, [3, 9, 20], -2.0, -0.1)))


@pytest.mark.parametrize("number", [0.0, 1e30, -1e30, -1.0])
def test_one_number_in_place_of_a_whole_response_is_a_filler(world: World, sample: Drawn, number: float) -> None:
    values = np.full(len(sample.tokens) - sample.prompt, number, np.float32)
    first, *_ = diagnose(evidence_of(world, sample, values), oracle_of(world, sample))
    assert first.cause == "filler"
    assert not list(value_transform(evidence_of(world, sample, values)))


@pytest.mark.filterwarnings("ignore:overflow")
def test_numbers_that_are_all_whole_for_their_size_are_no_filler(world: World, sample: Drawn) -> None:
    truth = right(world, sample).truth
    first, *_ = diagnose(evidence_of(world, sample, truth * np.float32(1e30)), oracle_of(world, sample))
    assert (first.cause, first.score) == ("value_transform", SETTLED)


def test_values_above_zero_are_no_softmax_s(world: World, sample: Drawn) -> None:
    high: Logprobs = right(world, sample).truth + np.float32(0.1)
    assert list(tokens_forbidden(evidence_of(world, sample, np.minimum(high, np.float32(0.0)))))
    high[::3] = 1e30
    assert not list(tokens_forbidden(evidence_of(world, sample, high)))


def test_a_block_with_less_than_a_block_in_front_has_no_block_before_it(world: World, sample: Drawn) -> None:
    wrong = right(world, sample).truth.copy()
    wrong[5] -= np.float32(1.0)
    assert not list(lost_blocks(evidence_of(world, sample, wrong), oracle_of(world, sample)))


def shrinking(evidence: Evidence, sure: bool) -> Evidence:
    """Differences that shrink along the response; sure: as the model gets surer, and no more than that."""
    count = len(evidence.truth)
    size = np.linspace(1.0, 0.1, count)
    truth = np.log1p(-0.8 * size) if sure else np.full(count, -1.0)
    moved = size * np.where(np.arange(count) % 2, 0.2, -0.2)
    return replace(evidence, truth=truth.astype(np.float32), found=(truth + moved).astype(np.float32))


def test_what_shrinks_as_a_model_gets_surer_is_nobody_s_context(world: World, sample: Drawn) -> None:
    evidence = right(world, sample)
    assert [said.cause for said in trend(shrinking(evidence, sure=False), 0.001)] == ["other_context"]
    assert not list(trend(shrinking(evidence, sure=True), 0.001))


def test_tokens_that_fit_one_row_each_explain_nothing() -> None:
    random = np.random.default_rng(0)
    listed, added = random.random((72, 3)) * 0.05, np.abs(random.standard_normal(72)) ** 3
    noise = 1e-3 * random.standard_normal(72)
    assert _foretells(listed, listed @ np.array([-1.0, 2.0, 0.7]) + noise)
    largest = np.argsort(-added)[:40]
    of_a_row = np.eye(72)[:, largest] + 1e-6 * random.random((72, 40))
    left = added - of_a_row @ np.linalg.lstsq(of_a_row, added, rcond=None)[0]
    assert np.abs(left).sum() < 0.1 * added.sum()  # so well it fits
    assert not _foretells(of_a_row, added)
    assert _can_be(np.array([-1.0, 2.0, 600.0]), 72)
    assert not _can_be(np.array([-1.0, 2.0, -2321.0]), 72)
    assert not _can_be(np.ones(15), 15)
