"""What is done behind the last hidden state: to lists of tokens, in steps of a softmax, to a row's values."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from auditor.causes.distribution.bands import other_filters
from auditor.causes.distribution.head import low_precision_output, low_precision_values
from auditor.causes.distribution.logits import logit_processor, penalised_values
from auditor.causes.distribution.masses import many_tokens
from auditor.causes.distribution.shards import one_shard
from auditor.causes.distribution.softmax_steps import rounded_steps
from auditor.causes.distribution.temperature import temperature
from auditor.causes.evidence import IN_PART, SETTLED, STRONG, Evidence
from auditor.causes.inputs import cause_of_failure
from auditor.causes.patterns import flat_last_bits
from auditor.causes.steps import two_steps
from auditor.causes.table import diagnose
from auditor.causes.values.combined import combined_values
from auditor.causes.values.filler import filler
from auditor.causes.values.lookup import value_order
from auditor.causes.values.transform import value_transform
from auditor.causes.values.unrelated import other_response, unrelated_values
from auditor.compare import Logprobs
from auditor.contracts import known_contracts
from auditor.faults.reported import behind, right
from auditor.faults.suite import head_of, logits_of, read_off
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from auditor.preconditions import first_failure
from tests.auditor.diagnosis import certain, evidence_of, said

VOCAB = 331
LIST = np.random.default_rng(4).choice(VOCAB, 14, replace=False)


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=8)


@pytest.fixture(scope="module")
def sample(world: World) -> Drawn:
    (drawn,) = world.draw(1, 24, 72)
    return replace(drawn, temperature=0.85)


def changed(world: World, s: Drawn, change: Callable[[np.ndarray, int], None], keep: bool = True) -> Logprobs:
    """change: gets a row of logits and its place; keep: the drawn token's own is not touched."""
    logits = logits_of(world, s)
    for at, (row, token) in enumerate(zip(logits, s.tokens[s.prompt :], strict=True)):
        own = row[token]
        change(row, at)
        row[token] = own if keep else row[token]
    return read_off(world, s, logits)


def heated(world: World, s: Drawn) -> tuple[np.ndarray, np.ndarray]:
    z = (logits_of(world, s)[:, :VOCAB] / np.float32(s.temperature)).astype(np.float32)
    return z, z[np.arange(len(z)), s.tokens[s.prompt :]]


def log_sum(z: np.ndarray) -> Logprobs:
    top = z.max(axis=1, keepdims=True)
    total: Logprobs = top[:, 0] + np.log(np.exp(z - top).sum(axis=1, dtype=np.float32))
    return total


def moved(row: np.ndarray, at: int) -> None:
    row[LIST] -= np.float32(3)


def gone(row: np.ndarray, at: int) -> None:
    row[290:310] = -np.inf


def allowed(row: np.ndarray, at: int) -> None:
    if at >= 30:
        row[:VOCAB][np.r_[0:40, 90:VOCAB]] = -np.inf


def growing(row: np.ndarray, at: int) -> None:
    row[2] += np.float32(0.04 * at)


@pytest.mark.parametrize(
    ("change", "keep", "words"),
    [
        (moved, False, ("14 tokens", "by -3")),
        (gone, True, ("without tokens 290 to 309",)),
        (allowed, True, ("of tokens 40 to 89",)),
        (growing, True, ("token 2 moves ever further",)),
    ],
)
def test_many_tokens_are_told_by_the_mass_of_all(
    world: World, sample: Drawn, change: Callable[[np.ndarray, int], None], keep: bool, words: tuple[str, ...]
) -> None:
    suggestion = said(many_tokens, world, sample, changed(world, sample, change, keep))
    assert suggestion is not None
    assert suggestion.cause == "logit_processor"
    assert suggestion.score >= STRONG
    for word in words:
        assert word in suggestion.evidence


def test_one_number_in_a_part_is_no_list_of_tokens_and_no_other_sample(world: World, sample: Drawn) -> None:
    wrong = right(world, sample).copy()
    wrong[20:50] = 0.0
    assert said(many_tokens, world, sample, wrong) is None
    wrong[20:50] = np.median(wrong[50:])
    assert not list(unrelated_values(evidence_of(world, sample, wrong)))


def test_what_leaves_out_other_tokens_than_the_unlikeliest_is_a_filter_of_another_order_or_a_list(
    world: World, sample: Drawn
) -> None:
    def without_the_likeliest(row: np.ndarray, at: int) -> None:
        row[np.argsort(-row[:VOCAB])[: 1 + at % 3]] = -np.inf

    def likeliest_of_each_rank(row: np.ndarray, at: int) -> None:
        for part in (row[:192], row[192:VOCAB]):
            part[part < np.sort(part)[-9]] = -np.inf

    many = np.random.default_rng(5).choice(VOCAB, 60, replace=False)

    def without_many(row: np.ndarray, at: int) -> None:
        row[many] = -np.inf

    for change, cause in (
        (without_the_likeliest, "truncated_sampling"),
        (likeliest_of_each_rank, "truncated_sampling"),
        (without_many, "logit_processor"),
    ):
        suggestion = said(other_filters, world, sample, changed(world, sample, change))
        assert suggestion is not None
        assert suggestion.cause == cause


def test_logits_that_were_bent_by_one_number_are_found_with_it(world: World, sample: Drawn) -> None:
    def smoothed(row: np.ndarray, at: int) -> None:
        row[:] = -np.float32(0.2) * (row - row[:VOCAB].max()) ** 2

    wrong = changed(world, sample, smoothed, keep=False)
    suggestion = said(logit_processor, world, sample, wrong)
    assert suggestion is not None
    assert suggestion.score >= 0.99 * STRONG
    assert "squared, times 0.2" in suggestion.evidence


def test_penalties_that_count_from_a_token_on_are_found_from_there(world: World, sample: Drawn) -> None:
    def present(row: np.ndarray, at: int) -> None:
        row[np.unique(sample.tokens[sample.prompt + 20 : sample.prompt + at])] -= np.float32(0.7)

    wrong = changed(world, sample, present, keep=False)
    certain(logit_processor, world, sample, wrong, "logit_processor", "0.7 on what came from token 44 on")


@pytest.mark.parametrize("change", [lambda x: x - 0.5, lambda x: 1.1 * x])
def test_a_penalty_behind_the_softmax_is_told_by_which_values_it_touches(
    world: World, sample: Drawn, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    values, tokens = right(world, sample), sample.tokens.tolist()
    again = np.array([tokens[at] in tokens[24:at] for at in range(24, 96)])
    wrong = np.where(again, change(values), values).astype(np.float32)
    (suggestion,) = penalised_values(evidence_of(world, sample, wrong))
    assert (suggestion.cause, suggestion.score) == ("logit_processor", IN_PART)
    wrong[np.flatnonzero(~again)[:3]] -= 1
    assert not list(penalised_values(evidence_of(world, sample, wrong)))


@pytest.mark.parametrize(("times", "word"), [(2, "with twice the"), (0, "without")])
def test_a_tile_of_the_vocabulary_that_is_counted_twice_or_never_is_named(
    world: World, sample: Drawn, times: int, word: str
) -> None:
    z, own = heated(world, sample)
    counted = np.concatenate([z[:, :64], *[z[:, 64:192]] * times, z[:, 192:]], axis=1)
    suggestion = said(one_shard, world, sample, own - log_sum(counted))
    assert suggestion is not None
    assert suggestion.cause == "vocabulary"
    assert f"{word} tokens 64 to 191" in suggestion.evidence


def test_what_is_done_to_logits_that_were_never_heated_is_found_beside_it(world: World, sample: Drawn) -> None:
    wrong = changed(world, replace(sample, temperature=1.0), moved, keep=False)
    certain(two_steps, world, sample, wrong, "logit_processor", "temperature 1", "14 tokens")


def test_temperatures_that_follow_the_entropy_are_told(world: World, sample: Drawn) -> None:
    z = logits_of(world, sample)[:, :VOCAB].astype(np.float64)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    heat = 0.4 - 0.15 * (p * np.log(p)).sum(axis=1)
    z /= heat[:, None]
    wrong = z[np.arange(len(z)), sample.tokens[sample.prompt :]] - np.log(np.exp(z).sum(axis=1))
    suggestion = said(temperature, world, sample, wrong.astype(np.float32))
    assert suggestion is not None
    assert suggestion.score == STRONG
    assert "entropies" in suggestion.evidence


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda z, own, now, old: log_sum(z) - (np.exp(z - log_sum(z)[:, None]) * z).sum(axis=1), "entropy"),
        (lambda z, own, now, old: own - z.max(axis=1), "the token's logit and -1 times the largest"),
        (lambda z, own, now, old: now - 0.5 * (np.arange(72) % 3 == 0), "right value and -0.5, at 24 tokens"),
        (lambda z, own, now, old: 0.75 * now + 0.25 * old, "0.75 times the right value and 0.25 times"),
        (lambda z, own, now, old: np.log(0.9 * np.exp(now.astype(np.float64)) + 1e-3), "each probability is 0.9"),
    ],
)
def test_values_of_several_numbers_of_their_row_are_told_with_the_weights(
    world: World, sample: Drawn, make: Callable[..., np.ndarray], word: str
) -> None:
    old = world.logprobs(world.decoder(sample.version - 1), sample)
    wrong = make(*heated(world, sample), right(world, sample), old).astype(np.float32)
    suggestion = said(combined_values, world, sample, wrong)
    assert suggestion is not None
    assert (suggestion.cause, suggestion.score) == ("value_transform", SETTLED)
    assert word in suggestion.evidence


def test_any_step_of_a_softmax_in_16_bits_is_found(world: World, sample: Drawn) -> None:
    z, own = heated(world, sample)
    top = z.max(axis=1, keepdims=True)
    total = from_bf16(to_bf16(np.exp(z - top))).sum(axis=1, dtype=np.float32)
    wrong = own - top[:, 0] - np.log(total)
    certain(rounded_steps, world, sample, wrong, "bf16_head", "a softmax with exponentials in bf16")
    parts = np.stack([from_bf16(to_bf16(log_sum(z[:, a : a + 128]))) for a in range(0, VOCAB, 128)], axis=1)
    certain(rounded_steps, world, sample, own - log_sum(parts), "bf16_head", "parts of 128 tokens, each in bf16")
    some = right(world, sample).copy()
    some[::3] = some[::3].astype(np.float16)
    suggestion = said(rounded_steps, world, sample, some)
    assert suggestion is not None
    assert "log-probabilities in fp16" in suggestion.evidence


def test_an_output_layer_whose_parts_are_rounded_is_found(world: World, sample: Drawn) -> None:
    decoder = world.decoder(sample.version)
    hidden, head = decoder.hidden([sample.tokens])[sample.prompt - 1 : -1], head_of(decoder)
    halves = (decoder.reference.gemm_fp32(hidden[:, a].copy(), head[:, a].copy()) for a in (np.s_[:80], np.s_[80:]))
    first, second = (from_bf16(to_bf16(half)) for half in halves)
    for total, how in ((first + second, "2 parts in bf16;"), (from_bf16(to_bf16(first + second)), "and their sum")):
        certain(low_precision_output, world, sample, read_off(world, sample, total), "bf16_head", how)


def test_differences_too_small_for_any_rounding_inside_of_the_model_are_its_head_s(world: World, sample: Drawn) -> None:
    truth = right(world, sample)
    for size, cause in ((1e-4, "bf16_head"), (1e-6, "reduction_order"), (5e-3, "reduction_order")):
        wrong = (truth + size * np.random.default_rng(1).standard_normal(len(truth))).astype(np.float32)
        assert next(flat_last_bits(evidence_of(world, sample, wrong), 0.013)).cause == cause


def test_other_tokens_behind_the_right_ones_are_read_off_the_bits(world: World, sample: Drawn) -> None:
    (other,) = world.draw(1, 24, 72)
    for since in (0, 20):
        tokens = np.concatenate([sample.tokens[: 24 + since], other.tokens[24 + since :]])
        wrong = right(world, replace(sample, tokens=tokens))
        first = ", ".join(map(str, other.tokens[24 + since : 30 + since].tolist()))
        certain(other_response, world, sample, wrong, "unrelated_values", f"from response token {since} on", first)
    targets = np.where(np.arange(72) == 9, 5, sample.tokens[24:])
    assert said(other_response, world, sample, read_off(world, sample, logits_of(world, sample), targets)) is None


def test_values_of_another_sample_in_a_part_are_told_from_those_of_another_prompt(world: World, sample: Drawn) -> None:
    (other,) = world.draw(1, 24, 72)
    theirs, wrong = right(world, replace(other, version=sample.version)), right(world, sample).copy()
    wrong[20:60] = theirs[20:60]
    (suggestion,) = unrelated_values(evidence_of(world, sample, wrong))
    assert "from token 20 to 59" in suggestion.evidence
    wrong[:] = right(world, sample)
    wrong[::2] = theirs[::2]
    assert list(unrelated_values(evidence_of(world, sample, wrong)))
    front = world.random.integers(0, VOCAB, 12)
    assert not list(unrelated_values(evidence_of(world, sample, behind(world, sample, front, restart=False))))


Read = Callable[[Evidence], Any]


@pytest.mark.parametrize(
    ("read", "change", "cause", "word"),
    [
        (value_order, lambda x: x[np.maximum(np.arange(72) - np.arange(72) // 20, 0)], "off_by_one", "ever further"),
        (value_order, lambda x: x[np.minimum(np.arange(72) + np.arange(72) // 20, 71)], "off_by_one", "ever further"),
        (value_transform, lambda x: np.clip(x, -3.0, -0.5), "value_transform", "below -3"),
        (value_transform, lambda x: np.rint(x / 0.0137) * 0.0137, "value_transform", "0.0137 apart"),
        (value_transform, lambda x: np.log(np.rint(np.exp(x) * 1e4 + 0.5) / 1e4), "value_transform", "4 decimals"),
        (value_transform, lambda x: x.reshape(6, 12).mean(axis=1).repeat(12), "value_transform", "means of 6 turns"),
        (value_transform, lambda x: x.reshape(3, 24).cumsum(axis=1).reshape(-1), "value_transform", "each of 3 turns"),
        (filler, lambda x: np.append(x[:-1], -100.0), "filler", "1 of 1 differing"),
        (filler, lambda x: np.r_[x[:9], np.zeros(5), x[14:60], np.full(12, -100.0)], "filler", "17 of 17"),
    ],
)
def test_what_was_done_to_values_is_read_off_them(
    world: World, sample: Drawn, read: Read, change: Callable[[np.ndarray], np.ndarray], cause: str, word: str
) -> None:
    wrong = change(right(world, sample).astype(np.float64)).astype(np.float32)
    (suggestion,) = read(evidence_of(world, sample, wrong))
    assert suggestion.cause == cause
    assert word in suggestion.evidence


def test_values_of_16_bits_are_not_taken_for_multiples_of_their_step(world: World, sample: Drawn) -> None:
    high = np.where(right(world, sample) > -2.0, np.float32(-3.0), right(world, sample)).astype(np.float32)
    evidence = replace(evidence_of(world, sample, from_bf16(to_bf16(high))), truth=high)
    assert not list(value_transform(evidence))
    assert list(low_precision_values(evidence))


@pytest.mark.parametrize(
    ("take", "cause", "word"),
    [
        (lambda t: np.append(t[:79], np.uint32(2)), "truncation", "but for its last 1"),
        (lambda t: np.delete(t, np.s_[40:56]), "truncation", "without 16 tokens from 40 on"),
        (lambda t: np.delete(t, np.s_[40:42]), "retokenisation", "differ from token 40 on"),
    ],
)
def test_what_was_cut_off_or_out_of_the_tokens_is_no_other_encoding(
    world: World, sample: Drawn, take: Callable[[np.ndarray], np.ndarray], cause: str, word: str
) -> None:
    rollout, trainer = world.records(sample)
    tokens = take(rollout.tokens)
    kept: dict[str, Any] = {
        "tokens": tokens, "token_count": len(tokens), "tokens_digest": "",
        "logprobs": trainer.logprobs[: len(tokens) - 24], "mask": trainer.mask[: len(tokens) - 24],
    }  # fmt: skip
    other = replace(trainer, **kept)
    failure = first_failure(rollout, other, known_contracts())
    assert failure is not None
    suggestion = cause_of_failure(failure, rollout, other)
    assert suggestion.cause == cause
    assert word in suggestion.evidence


def test_a_nan_among_values_that_are_all_rounded_otherwise_is_no_rounding(world: World, sample: Drawn) -> None:
    values = right(world, sample) * np.float32(1 + 1e-5)
    values[9] = np.nan
    suggestions = diagnose(evidence_of(world, sample, values), None)
    assert suggestions[0].cause == "nonfinite"
    assert {suggestion.cause for suggestion in suggestions} > {"nonfinite"}
