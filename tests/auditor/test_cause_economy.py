"""What a search costs, in forwards: nothing is computed twice, and nothing where no forward could tell."""

from dataclasses import replace

import numpy as np
import pytest

from auditor.causes.context.context_parallel import slice_edges
from auditor.causes.context.front import cut_in_front
from auditor.causes.context.kv import stale_kv
from auditor.causes.context.rope import turned
from auditor.causes.context.slots import cached
from auditor.causes.context.stepwise import row_by_row
from auditor.causes.distribution.masses import _moving
from auditor.causes.edits import edited
from auditor.causes.evidence import CERTAIN
from auditor.causes.oracle import Oracle
from auditor.causes.pieces import largest_piece
from auditor.causes.purse import Purse
from auditor.causes.table import _of_models, diagnose
from auditor.causes.values.filler import filler
from auditor.causes.weights.versions import stale_weights
from auditor.compare import Logprobs
from auditor.faults.growing import growing
from auditor.faults.world import VERSIONS, Drawn, World, moved
from tests.auditor.diagnosis import evidence_of, oracle_of


def test_sequences_that_grow_token_by_token_have_the_bits_of_whole_ones(world: World, sample: Drawn) -> None:
    decoder, other = world.decoder(sample.version), np.roll(sample.tokens, 5)
    grown = growing(decoder)
    grown.hidden([sample.tokens[:24], other[:24]])
    for end in range(25, 50):
        rows = grown.hidden([sample.tokens[end - 1 : end], other[end - 1 : end]])
        whole = [decoder.hidden([tokens[:end]])[-1] for tokens in (sample.tokens, other)]
        assert rows.tobytes() == np.stack(whole).tobytes()


class Counting(Purse):
    """Counts what is spent."""

    def __init__(self) -> None:
        super().__init__(1e6, 1e6)
        self.forwards, self.times = 0.0, 0

    def spend(self, forwards: float) -> None:
        super().spend(forwards)
        self.forwards += forwards
        self.times += 1


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=5)


def counting(world: World, sample: Drawn) -> tuple[Oracle, Counting]:
    oracle, purse = oracle_of(world, sample), Counting()
    oracle.purse = purse
    return oracle, purse


def unknown(world: World, sample: Drawn) -> Logprobs:
    """Under weights that are no version's."""
    random = np.random.default_rng(3)
    weights = {n: moved(w, 2.0**-6, random) for n, w in world.decoder(sample.version).weights.items()}
    return world.logprobs(world.with_weights(weights), sample)


def test_a_versions_forward_is_computed_once_whatever_asks_for_it(world: World, sample: Drawn) -> None:
    oracle, purse = counting(world, sample)
    evidence = evidence_of(world, sample, unknown(world, sample))
    assert not list(stale_weights(evidence, oracle))
    assert purse.forwards == VERSIONS - 1
    for version in range(1, VERSIONS + 1):
        if version != sample.version:
            other = oracle.of_version(version)
            assert other.from_logits(other.own_logits).tobytes() == oracle.logprobs_of(version).tobytes()
    assert purse.forwards == VERSIONS - 1
    list(stale_kv(evidence, oracle))
    own = purse.forwards
    oracle.once()
    assert purse.forwards == own + 1
    cached(oracle, oracle.decoder)
    assert oracle.own_hidden is oracle.once().hidden
    assert purse.forwards == own + 1


def test_values_of_a_version_are_those_at_the_temperature_that_asks(world: World, sample: Drawn) -> None:
    oracle, _ = counting(world, sample)
    heated = oracle.at_temperature(2.0)
    version = sample.version - 1
    assert oracle.logprobs_of(version).tobytes() == world.logprobs(world.decoder(version), sample).tobytes()
    assert heated.logprobs_of(version).tobytes() == world.logprobs(world.decoder(version), sample, 2.0).tobytes()


def test_rows_that_go_on_in_the_same_way_are_computed_together(world: World, sample: Drawn) -> None:
    oracle, purse = counting(world, sample)
    where = np.arange(len(sample.tokens), dtype=np.float64)
    decoder = edited(world.decoder(sample.version), turned(oracle, where + 8 * (where >= sample.prompt)))
    (said,) = row_by_row(evidence_of(world, sample, world.logprobs(decoder, sample)), oracle)
    assert (said.cause, said.score) == ("position_offset", CERTAIN)
    assert purse.times < 24  # of 72 rows


def test_where_nobody_computed_what_is_wrong_no_model_is_searched(world: World, sample: Drawn) -> None:
    right = world.logprobs(world.decoder(sample.version), sample)
    wrong = right.copy()
    wrong[[3, 30]] = 0.0, np.nan
    oracle, _ = counting(world, sample)
    assert _of_models(evidence_of(world, sample, wrong), oracle) == ()
    wrong[40] -= np.float32(0.5)
    assert _of_models(evidence_of(world, sample, wrong), oracle)
    assert diagnose(evidence_of(world, sample, np.where(wrong == 0.0, wrong, right)), oracle)[0].cause == "filler"


def test_a_zero_where_a_sure_model_is_within_its_last_bits_of_it_is_no_filler(world: World, sample: Drawn) -> None:
    evidence = evidence_of(world, sample, world.logprobs(world.decoder(sample.version), sample))
    truth, found = evidence.truth.copy(), evidence.truth + np.float32(0.01)
    truth[7], found[7] = np.float32(-4e-6), 0.0
    assert not list(filler(replace(evidence, truth=truth, found=found)))
    truth[[7, 9]], found[9] = np.float32(-0.4), 0.0
    assert list(filler(replace(evidence, truth=truth, found=found)))
    found[9] = -1.0
    assert not list(filler(replace(evidence, truth=truth, found=found)))  # once, where all is wrong


def test_zeros_are_no_piece_of_what_would_be_as_sure(world: World, sample: Drawn) -> None:
    right = world.logprobs(world.decoder(sample.version), sample)
    wrong = right.copy()
    wrong[3:9] = 0.0
    oracle, _ = counting(world, sample)
    oracle.said.append(("logit_processor", "a penalty", wrong))
    assert largest_piece(evidence_of(world, sample, wrong), oracle) is None
    wrong[3:9] = -0.25
    piece = largest_piece(evidence_of(world, sample, wrong), oracle)
    assert piece is not None
    assert piece.rows.sum() == 6


def test_right_values_behind_one_that_is_far_off_say_that_each_is_wrong_by_itself(world: World, sample: Drawn) -> None:
    """Also where most of the wrong ones are near, as zeros are near what a sure model says."""
    right = world.logprobs(world.decoder(sample.version), sample)
    wrong = right.copy()
    wrong[[2, 60]] -= np.float32(1.0)
    wrong[[9, 20, 33, 47, 52]] += np.float32(0.001)
    assert evidence_of(world, sample, wrong).pointwise
    wrong[2:] -= np.float32(0.001)
    assert not evidence_of(world, sample, wrong).pointwise


def test_wrong_values_at_all_edges_of_slices_are_told_by_where_they_stand(world: World, sample: Drawn) -> None:
    right = world.logprobs(world.decoder(sample.version), sample)
    for at, slices in (([1, 25, 49], 4), ([1, 25, 40], 0), ([9, 41], 0)):
        wrong = right.copy()
        wrong[at] += np.float32(3e-4)
        said = [s.evidence for s in slice_edges(evidence_of(world, sample, wrong))]
        assert said == (
            [f"the 3 values that are wrong stand at the edges of {slices} slices, one each"] if slices else []
        )


def test_what_is_further_off_than_without_a_prompt_is_nothing_in_the_prompt(world: World, sample: Drawn) -> None:
    decoder = world.decoder(sample.version)
    tokens = sample.tokens.copy()
    tokens[3:9] = tokens[:6]
    other = world.logprobs(decoder, replace(sample, tokens=tokens))
    for wrong, beyond in ((other, False), (world.logprobs(decoder, sample) - np.float32(20.0), True)):
        oracle, _ = counting(world, sample)
        evidence = evidence_of(world, sample, wrong)
        list(cut_in_front(evidence, oracle))
        assert oracle.beyond_the_prompt == beyond


def test_a_jump_between_rows_that_tell_nothing_is_no_way_that_a_logit_goes(world: World, sample: Drawn) -> None:
    oracle, _ = counting(world, sample)
    mass, rows = np.full((20, 1), 1e-2), np.arange(20)
    growing_ever = np.linspace(0.1, 2.0, 20)
    jumping = 0.1 * (-1.0) ** rows
    jumping[9] = 20.0
    mass[[8, 10]] = 1e-9  # of which a value of fp32 says nothing
    for by, found in ((growing_ever, True), (jumping, False)):
        said = _moving(oracle, rows, mass[:, 0] * np.expm1(by), mass, np.array([2]))
        assert (said is not None) == found
