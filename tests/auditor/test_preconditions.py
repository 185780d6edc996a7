"""The six conditions, in order: each can fail, the first that fails is named, and ignorance is no agreement."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from auditor.judge import Verdict, judge_pair
from auditor.preconditions import CHECKS, Condition, first_failure
from auditor.records import Environment, Positions, RolloutRecord, Sampling, TrainerRecord
from rl_kernel.contracts import model_contract
from tests.auditor.samples import CONTRACTS, LAYOUT, pair

Bend = Callable[[RolloutRecord, TrainerRecord], tuple[RolloutRecord, TrainerRecord]]


def trainer_has(**change: Any) -> Bend:
    return lambda rollout, trainer: (rollout, replace(trainer, **change))


def rollout_has(**change: Any) -> Bend:
    return lambda rollout, trainer: (replace(rollout, **change), trainer)


def both_have(**change: Any) -> Bend:
    return lambda rollout, trainer: (replace(rollout, **change), replace(trainer, **change))


def other_token(rollout: RolloutRecord, trainer: TrainerRecord) -> tuple[RolloutRecord, TrainerRecord]:
    assert trainer.tokens is not None
    tokens = trainer.tokens.copy()
    tokens[9] = (tokens[9] + 1) % 331
    return rollout, replace(trainer, tokens=tokens, tokens_digest="")


def shifted_cut(rollout: RolloutRecord, trainer: TrainerRecord) -> tuple[RolloutRecord, TrainerRecord]:
    return rollout, replace(trainer, prompt_len=9, logprobs=trainer.logprobs[1:], mask=trainer.mask[1:])


def shorter(rollout: RolloutRecord, trainer: TrainerRecord) -> tuple[RolloutRecord, TrainerRecord]:
    assert trainer.tokens is not None
    cut = {"tokens": trainer.tokens[:-1], "logprobs": trainer.logprobs[:-1], "mask": trainer.mask[:-1]}
    return rollout, replace(trainer, token_count=39, tokens_digest="", **cut)


def other_arithmetic(**environment: str) -> Bend:
    """The trainer computes as another GPU maker's would, and the two environments say `environment`."""

    def bend(rollout: RolloutRecord, trainer: TrainerRecord) -> tuple[RolloutRecord, TrainerRecord]:
        theirs = {"arch": "cuda-sm90", "mma": "sm90", "digest": "cc" * 32, **environment}
        contract = model_contract("sm90", segments=2).digest()
        return (
            replace(rollout, environment=replace(rollout.environment, **environment)),
            replace(trainer, contract_digest=contract, environment=Environment(**theirs)),
        )

    return bend


def versions_are(ours: tuple[str, ...], theirs: tuple[str, ...]) -> Bend:
    """Two environments with packages of these versions, and so of two digests."""

    def bend(rollout: RolloutRecord, trainer: TrainerRecord) -> tuple[RolloutRecord, TrainerRecord]:
        return (
            replace(rollout, environment=replace(rollout.environment, digest="aa" * 32, versions=ours)),
            replace(trainer, environment=replace(trainer.environment, digest="bb" * 32, versions=theirs)),
        )

    return bend


MASK = np.array([False] + [True] * 31)
S = Sampling(temperature=1.0, seed=7)
CASES: list[tuple[Bend, Condition, str]] = [
    (trainer_has(weight_version=2), Condition.WEIGHTS, "weight_version"),
    (trainer_has(weight_digest="99" * 32), Condition.WEIGHTS, "weight_digest"),
    (both_have(weight_version=-1), Condition.WEIGHTS, "weight_version"),
    (both_have(weight_digest=""), Condition.WEIGHTS, "weight_digest"),
    (other_token, Condition.INPUTS, "tokens[9]"),
    (trainer_has(tokens=None, tokens_digest="77" * 32), Condition.INPUTS, "tokens_digest"),
    (shifted_cut, Condition.INPUTS, "prompt_len"),
    (shorter, Condition.INPUTS, "token_count"),
    (trainer_has(mask=MASK), Condition.INPUTS, "mask[0]"),
    (both_have(mask=np.zeros(32, np.bool_)), Condition.INPUTS, "mask"),
    (trainer_has(positions=Positions("03" * 32)), Condition.POSITIONS, "positions.rope_digest"),
    (trainer_has(positions=Positions("02" * 32, offset=1)), Condition.POSITIONS, "positions.offset"),
    (trainer_has(positions=Positions("02" * 32, attention="full")), Condition.POSITIONS, "positions.attention"),
    (both_have(positions=Positions("")), Condition.POSITIONS, "positions.rope_digest"),
    (trainer_has(layout=replace(LAYOUT, vocab_size=332)), Condition.LOGICAL_STATE, "layout.vocab_size"),
    (both_have(layout=replace(LAYOUT, tp_size=0)), Condition.LOGICAL_STATE, "layout.tp_size"),
    (trainer_has(layout=replace(LAYOUT, tp_size=4)), Condition.LOGICAL_STATE, "layout.tp_size"),
    (rollout_has(layout=replace(LAYOUT, vocab_shards=(0, 100, 384))), Condition.LOGICAL_STATE, "layout.vocab_shards"),
    (rollout_has(layout=replace(LAYOUT, vocab_shards=(0, 64))), Condition.LOGICAL_STATE, "layout.vocab_shards"),
    (both_have(layout=replace(LAYOUT, vocab_shards=())), Condition.LOGICAL_STATE, "layout.vocab_shards"),
    (
        rollout_has(layout=replace(LAYOUT, vocab_shards=(0, 128, 256, 384))),
        Condition.LOGICAL_STATE,
        "layout.vocab_shards",
    ),
    (trainer_has(layout=replace(LAYOUT, padded_vocab_size=330)), Condition.LOGICAL_STATE, "layout.padded_vocab_size"),
    (both_have(layout=replace(LAYOUT, vocab_size=10)), Condition.LOGICAL_STATE, "tokens"),
    (trainer_has(sampling=replace(S, temperature=0.7)), Condition.RANDOM_STATE, "sampling.temperature"),
    (trainer_has(sampling=replace(S, top_p=0.9)), Condition.RANDOM_STATE, "sampling.top_p"),
    (trainer_has(sampling=replace(S, top_k=5)), Condition.RANDOM_STATE, "sampling.top_k"),
    (trainer_has(sampling=replace(S, min_p=0.1)), Condition.RANDOM_STATE, "sampling.min_p"),
    (trainer_has(sampling=replace(S, logprobs_mode="raw_logprobs")), Condition.RANDOM_STATE, "sampling.logprobs_mode"),
    (trainer_has(sampling=replace(S, seed=8)), Condition.RANDOM_STATE, "sampling.seed"),
    (both_have(sampling=replace(S, seed=None)), Condition.RANDOM_STATE, "sampling.seed"),
    (trainer_has(sampling=replace(S, seed=-7)), Condition.RANDOM_STATE, "sampling.seed"),
    (both_have(contract_digest=""), Condition.CONTRACT, "contract_digest"),
    (both_have(contract_digest="55" * 32), Condition.CONTRACT, "contract_digest"),
    (
        trainer_has(contract_digest=model_contract("portable", segments=4).digest()),
        Condition.CONTRACT,
        "contract_digest",
    ),
    (trainer_has(environment=Environment("cpu-x86_64", "sm90", "aa" * 32)), Condition.CONTRACT, "environment.mma"),
    (trainer_has(environment=Environment("cuda-sm90", "fma32", "aa" * 32)), Condition.CONTRACT, "environment.arch"),
    (trainer_has(environment=Environment("cpu-x86_64", "fma32", "bb" * 32)), Condition.CONTRACT, "environment.digest"),
    (both_have(environment=Environment("cpu-x86_64", "fma32", "")), Condition.CONTRACT, "environment.digest"),
    (versions_are(("torch 2.12",), ("torch 2.13",)), Condition.CONTRACT, "environment.versions.torch"),
    (versions_are(("torch 2.13", "vllm 0.32"), ("torch 2.13",)), Condition.CONTRACT, "environment.versions.vllm"),
    (versions_are((), ("torch 2.13",)), Condition.CONTRACT, "environment.digest"),
    (other_arithmetic(arch=""), Condition.CONTRACT, "environment.arch"),
    (other_arithmetic(digest=""), Condition.CONTRACT, "environment.digest"),
]


def test_two_sound_sides_may_be_compared() -> None:
    assert first_failure(*pair(), CONTRACTS) is None


@pytest.mark.parametrize(
    ("bend", "condition", "field"), CASES, ids=[f"{c.value}-{f}-{i}" for i, (_, c, f) in enumerate(CASES)]
)
def test_what_differs_or_is_unknown_is_named_with_both_values(bend: Bend, condition: Condition, field: str) -> None:
    failure = first_failure(*bend(*pair()), CONTRACTS)
    assert failure is not None
    assert (failure.condition, failure.field) == (condition, field)
    assert failure.rollout
    assert failure.trainer


@pytest.mark.parametrize(("bend", "condition", "field"), CASES, ids=range(len(CASES)))
def test_a_sample_that_cannot_be_compared_is_neither_match_nor_mismatch(
    bend: Bend, condition: Condition, field: str
) -> None:
    judged = judge_pair(*bend(*pair()), CONTRACTS)
    assert judged.judgement.verdict is Verdict.NOT_COMPARABLE
    assert judged.judgement.compared == 0
    assert judged.drift.tokens == 0


def test_every_condition_has_a_case() -> None:
    assert {condition for _, condition, _ in CASES} == {condition for condition, _ in CHECKS} == set(Condition)


def test_the_first_of_several_failures_is_the_one_that_is_named() -> None:
    """Bend one field of each condition and take the failures away one by one, first to last."""
    bends = {condition: bend for bend, condition, _ in reversed(CASES)}
    order = [condition for condition, _ in CHECKS]
    for start in range(len(order)):
        rollout, trainer = pair()
        for condition in order[start:]:
            rollout, trainer = bends[condition](rollout, trainer)
        failure = first_failure(rollout, trainer, CONTRACTS)
        assert failure is not None
        assert failure.condition is order[start]


def test_the_package_that_differs_is_named_with_both_versions() -> None:
    failure = first_failure(
        *versions_are(("vllm 0.32.0", "torch 2.13.0+cpu"), ("torch 2.13.0+cpu",))(*pair()), CONTRACTS
    )
    assert failure is not None
    assert (failure.field, failure.rollout, failure.trainer) == (
        "environment.versions.vllm",
        "0.32.0",
        "not installed",
    )


def test_two_arithmetics_whose_environments_are_known_may_be_compared() -> None:
    assert first_failure(*other_arithmetic()(*pair()), CONTRACTS) is None


@pytest.mark.parametrize("seed", [0, -1, -(2**63)])
def test_any_number_that_both_sides_state_is_a_seed(seed: int) -> None:
    assert first_failure(*both_have(sampling=replace(S, seed=seed))(*pair()), CONTRACTS) is None


def test_layouts_over_which_the_contract_is_invariant_may_differ() -> None:
    rollout, trainer = pair()
    cut = replace(LAYOUT, tp_size=2, vocab_shards=(0, 192, 384))
    assert first_failure(rollout, replace(trainer, layout=cut), CONTRACTS) is None
