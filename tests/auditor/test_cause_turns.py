"""Searches take turns: what is common in each comes before what is rare in any, and nothing that was found is lost."""

import math
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from auditor.causes import sample
from auditor.causes.computation.reduction import split_sums
from auditor.causes.context.kv import stale_kv
from auditor.causes.context.stepwise import row_by_row
from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.purse import OutOfBudget, Purse
from auditor.causes.search import Candidate, nearest
from auditor.causes.table import OF_MODELS, _long, _of_models, _unsure, diagnose
from auditor.causes.turns import Search, in_turns
from auditor.faults.world import World
from auditor.judge import ReferenceLogprobs
from tests.auditor.diagnosis import evidence_of, oracle_of

FORWARDS = 100.0  # of which a turn has five


def spending(purse: Purse, name: str, order: list[str], times: int, last: Suggestion | None = None) -> Search:
    def search() -> Iterator[Suggestion]:
        for at in range(times):
            purse.spend(1.0)
            order.append(f"{name}{at}")
        if last is not None:
            yield last

    return search


def never(found: list[Suggestion]) -> bool:
    return False


@pytest.mark.parametrize(
    ("own", "clock", "over"), [(29.0, 290.0, False), (31.0, 31.0, True), (31.0, 29.0, False), (0.1, 301.0, True)]
)
def test_a_search_that_gets_no_core_has_ten_times_as_long_by_the_clock(
    monkeypatch: pytest.MonkeyPatch, own: float, clock: float, over: bool
) -> None:
    started = time.process_time(), time.monotonic()
    monkeypatch.setattr(
        "auditor.causes.purse.time", SimpleNamespace(process_time=lambda: started[0], monotonic=lambda: started[1])
    )
    purse = Purse(math.inf, 30.0)
    monkeypatch.setattr(
        "auditor.causes.purse.time",
        SimpleNamespace(process_time=lambda: started[0] + own, monotonic=lambda: started[1] + clock),
    )
    if over:
        with pytest.raises(OutOfBudget):
            purse.spend(1.0)
    else:
        purse.spend(1.0)


def test_no_search_has_a_second_turn_before_all_have_had_one_and_a_long_turn_is_twice_as_long() -> None:
    purse, order = Purse(FORWARDS, math.inf), list[str]()
    searches = [("a", spending(purse, "a", order, 12), 1.0), ("b", spending(purse, "b", order, 12), 2.0)]
    assert in_turns(searches, purse, [], never) == []
    assert order[:15] == [f"a{i}" for i in range(5)] + [f"b{i}" for i in range(10)]
    assert order[15:] == [f"a{i}" for i in range(5, 10)] + ["b10", "b11", "a10", "a11"]


def test_a_search_that_ends_in_its_first_turn_is_done_before_the_next_begins() -> None:
    purse, order, found = Purse(FORWARDS, math.inf), list[str](), list[Suggestion]()
    said = Suggestion("a", 1.0, "")
    searches = [("a", spending(purse, "a", order, 3, said), 1.0), ("b", spending(purse, "b", order, 3), 1.0)]
    in_turns(searches, purse, found, bool)
    assert (order, found) == (["a0", "a1", "a2"], [said])


def test_where_the_budget_ends_those_that_never_began_are_named_and_no_thread_is_left() -> None:
    purse, order = Purse(FORWARDS, math.inf), list[str]()
    searches = [(name, spending(purse, name, order, 1000), 7.0) for name in "abcd"]
    before = threading.active_count()
    assert in_turns(searches, purse, [], never) == ["d"]
    assert len(order) == FORWARDS
    for _ in range(100):  # a thread that was told to end may still be on its last line
        if threading.active_count() == before:
            break
        threading.Event().wait(0.01)
    assert threading.active_count() == before


def test_an_error_inside_of_a_search_is_raised_where_the_searches_were_started() -> None:
    purse = Purse(FORWARDS, math.inf)

    def broken() -> Iterator[Suggestion]:
        purse.spend(1.0)
        raise ValueError("broken")
        yield

    with pytest.raises(ValueError, match="broken"):
        in_turns([("a", spending(purse, "a", [], 20), 1.0), ("broken", broken, 1.0)], purse, [], never)


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=5)


def in_part(world: World) -> Evidence:
    """Values of which a prediction takes away a part."""
    (sample,) = world.draw(1, 24, 40)
    right = world.logprobs(world.decoder(sample.version), sample)
    return evidence_of(world, sample, right + np.linspace(0.5, 1.0, 40, dtype=np.float32))


def test_what_was_nearest_until_the_budget_ended_is_said(world: World) -> None:
    evidence = in_part(world)
    (sample,) = world.draw(1, 24, 40)
    oracle = oracle_of(world, sample)

    def candidates() -> Iterator[Candidate]:
        yield "near", "what is near", evidence.truth + np.float32(0.7)
        raise OutOfBudget

    best = nearest(evidence, oracle, candidates())
    assert best is not None
    assert best.cause == "near"


def test_what_takes_away_a_part_comes_behind_what_it_looks_like_where_time_ended() -> None:
    weak, strong = Suggestion("a", 0.58, ""), Suggestion("b", 0.85, "")
    assert _unsure(weak).score < 0.35
    assert _unsure(strong) == strong


def test_where_time_ends_the_fall_back_says_what_was_not_tried(world: World) -> None:
    (sample,) = world.draw(1, 24, 40)
    random = np.random.default_rng(3)
    weights = {n: np.roll(w, 7, axis=0) if "down_proj" in n else w for n, w in world.decoder(4).weights.items()}
    wrong = world.logprobs(world.with_weights(weights), sample)
    oracle = oracle_of(world, sample)
    oracle.purse = Purse(40.0, math.inf)
    suggestions = diagnose(evidence_of(world, sample, wrong + random.normal(0, 0.01, 40).astype(np.float32)), oracle)
    assert any("searches began" in suggestion.evidence for suggestion in suggestions)
    assert any("one more token" in suggestion.evidence for suggestion in suggestions)


def test_what_overflows_in_a_search_is_treated_as_where_the_searches_were_begun() -> None:
    def overflows() -> Iterator[Suggestion]:
        yield Suggestion("a", float(np.float32(3e38) * np.float32(10)), "")

    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        in_turns([("a", overflows, 1.0)], Purse(FORWARDS, math.inf), [], never)
    found = list[Suggestion]()
    with np.errstate(over="ignore"):
        in_turns([("a", overflows, 1.0)], Purse(FORWARDS, math.inf), found, never)
    assert found[0].score == math.inf


def test_what_has_the_bits_of_a_few_rows_is_finished_in_its_turn() -> None:
    purse, said = Purse(FORWARDS, math.inf), list[str]()

    def found() -> Iterator[Suggestion]:
        purse.spend(2.0 * FORWARDS * 0.05)
        with purse.undisturbed():
            purse.spend(1.0)
        said.append("found")
        yield Suggestion("a", 1.0, "")

    def other() -> Iterator[Suggestion]:
        said.append("other")
        yield Suggestion("b", 0.1, "")

    in_turns([("found", found, 1.0), ("other", other, 1.0)], purse, [], bool)
    assert said == ["found"]


def test_what_begins_at_a_token_is_asked_of_caches_and_rows_first(world: World) -> None:
    (sample,) = world.draw(1, 24, 40)
    wrong = world.logprobs(world.decoder(sample.version - 1), sample)
    oracle = oracle_of(world, sample)
    assert row_by_row not in _of_models(evidence_of(world, sample, wrong), oracle)[:3]
    wrong[:1] = world.logprobs(world.decoder(sample.version), sample)[:1]
    first, second, *rest = _of_models(evidence_of(world, sample, wrong), oracle)
    assert (first, second) == (stale_kv, row_by_row)
    assert {first, second, *rest, split_sums} == set(OF_MODELS)
    assert _long(row_by_row, evidence_of(world, sample, wrong)) == 2.0


@pytest.mark.parametrize(("seconds", "forwards"), [(30.0, math.inf), (math.inf, 760)])
def test_a_search_that_has_seconds_is_ended_by_no_count_of_forwards(
    monkeypatch: pytest.MonkeyPatch, world: World, seconds: float, forwards: float
) -> None:
    rollout, trainer = world.records(world.draw(1, 4, 8)[0])
    found: list[float] = []
    monkeypatch.setattr(sample, "_oracle", lambda _, __, budget, ___: found.append(budget))
    monkeypatch.setattr(sample, "diagnose", lambda *_: [])
    reference = ReferenceLogprobs(rollout.logprobs + 1, trainer.logprobs, "fma32")
    weights = sample.Weights(world.decoder(1), (), world.decoder)
    sample.diagnose_sample(rollout, trainer, reference, weights, seconds=seconds)
    assert found == [forwards]
