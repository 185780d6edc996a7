"""Which samples are recomputed, and what that choice can miss."""

import tracemalloc
from fractions import Fraction

import pytest

from auditor.records import SampleKey
from auditor.sampling import Candidate, EveryStep, FirstOfStep, Rate, make_policy, miss_probability


def candidate(i: int, step: int = 0, engine: str = "e", length: int = 10) -> Candidate:
    return Candidate(SampleKey("run", step, str(i)), engine, length)


def test_a_rate_takes_its_share_and_always_the_same_samples() -> None:
    chosen = [i for i in range(20_000) if Rate(0.05).wants(candidate(i))]
    assert 900 < len(chosen) < 1100
    assert chosen == [i for i in range(20_000) if Rate(0.05).wants(candidate(i))]
    assert not any(Rate(0.0).wants(candidate(i)) for i in range(1000))
    assert all(Rate(1.0).wants(candidate(i)) for i in range(1000))


def test_a_higher_rate_keeps_what_a_lower_one_chose() -> None:
    low = {i for i in range(2000) if Rate(0.1).wants(candidate(i))}
    assert low < {i for i in range(2000) if Rate(0.3).wants(candidate(i))}


def test_every_nth_step_is_taken_whole() -> None:
    assert [step for step in range(8) if EveryStep(3).wants(candidate(0, step))] == [0, 3, 6]


def test_the_first_of_each_step_are_taken() -> None:
    policy = FirstOfStep(2)
    assert [policy.wants(candidate(i, step)) for step in (0, 1) for i in range(4)] == [True, True, False, False] * 2


def test_asked_again_of_a_sample_the_answer_is_the_same_and_nobody_loses_a_place() -> None:
    policy = FirstOfStep(2)
    assert [policy.wants(candidate(i)) for i in (0, 0, 0, 1, 2, 0, 2)] == [True, True, True, True, False, True, False]


def test_what_was_chosen_takes_a_few_bytes_a_sample() -> None:
    policy = FirstOfStep(64)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for step in range(512):
            assert sum(policy.wants(candidate(i * 7919, step)) for i in range(66)) == 64
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= 512 * (64 * 16 + 512), "8 bytes, room to grow, and a name a step"


def test_strata_are_engines_and_lengths() -> None:
    policy = FirstOfStep(1, stratified=True)
    drawn = [("a", 10), ("a", 12), ("b", 10), ("a", 100), ("b", 11), ("b", 100)]
    wanted = [policy.wants(candidate(i, engine=engine, length=length)) for i, (engine, length) in enumerate(drawn)]
    assert wanted == [True, False, True, True, False, True]


def test_policies_add_up() -> None:
    policy = make_policy(0.0, 2, 1, 0)
    assert [policy.wants(candidate(i, step)) for step in range(3) for i in range(2)] == [
        True,
        True,
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("p", "share", "samples"), [(Fraction(1, 20), Fraction(1, 100), 1000), (Fraction(1, 4), Fraction(1, 10), 40)]
)
def test_the_chance_to_miss_is_that_of_passing_over_every_affected_sample(
    p: Fraction, share: Fraction, samples: int
) -> None:
    exact = (1 - p) ** int(share * samples)
    assert abs(miss_probability(float(p), float(share), samples) - float(exact)) < 1e-12


def test_the_ends_of_the_chance_to_miss() -> None:
    assert miss_probability(1.0, 0.5, 10) == 0.0
    assert miss_probability(0.0, 0.5, 10) == 1.0
    assert miss_probability(0.5, 0.0, 10) == 1.0
    with pytest.raises(ValueError, match="p is 2"):
        miss_probability(2.0, 0.5, 10)
