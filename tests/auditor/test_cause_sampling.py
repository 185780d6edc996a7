"""What a sampler does to logits: penalties and their scope, filters beside a temperature, allowed sets, lost shards."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from auditor.causes.computation.reduction import rounding_noise
from auditor.causes.distribution.bands import other_filters
from auditor.causes.distribution.blurred import blurred_filter
from auditor.causes.distribution.head import low_precision_head
from auditor.causes.distribution.logits import logit_processor
from auditor.causes.distribution.shards import one_shard
from auditor.causes.distribution.softmax import touched_tokens
from auditor.causes.distribution.truncation import truncation
from auditor.causes.evidence import STRONG
from auditor.causes.steps import sampler_defaults
from auditor.causes.values.lookup import other_token
from auditor.faults.blind import nucleus
from auditor.faults.suite import filtered, head_of, logits_of, read_off
from auditor.faults.world import Drawn, World
from tests.auditor.diagnosis import certain, oracle_of, said


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=6)


@pytest.fixture(scope="module")
def sample(world: World) -> Drawn:
    (drawn,) = world.draw(1, 24, 72)
    return replace(drawn, temperature=0.85)


def each_row(world: World, s: Drawn, change: Callable[[np.ndarray, int], None]) -> np.ndarray:
    """change: gets a row of logits and how many tokens stand in front."""
    logits = logits_of(world, s)
    for at, row in enumerate(logits):
        change(row, s.prompt + at)
    return read_off(world, s, logits)


def test_penalties_are_told_apart_by_their_numbers_and_by_what_they_count(world: World, sample: Drawn) -> None:
    def repeated(row: np.ndarray, end: int) -> None:
        seen = np.unique(sample.tokens[end - 19 : end])
        row[seen] = np.where(row[seen] > 0, row[seen] / np.float32(1.05), row[seen] * np.float32(1.05))

    wrong = each_row(world, sample, repeated)
    certain(logit_processor, world, sample, wrong, "logit_processor", "repetition penalty of 1.05 on the last 19")

    def counted(row: np.ndarray, end: int) -> None:
        ids, times = np.unique(sample.tokens[sample.prompt : end], return_counts=True)
        row[ids] = row[ids] - np.float32(0.25) * times.astype(np.float32) - np.float32(0.5)

    wrong = each_row(world, sample, counted)
    both = "presence penalty of 0.5 and a frequency penalty of 0.25 on the response"
    certain(logit_processor, world, sample, wrong, "logit_processor", both)


def test_tokens_that_may_not_come_again_are_found(world: World, sample: Drawn) -> None:
    def barred(row: np.ndarray, end: int) -> None:
        drawn = row[sample.tokens[end]]
        row[sample.tokens[end - 5 : end]] = -np.inf
        row[sample.tokens[end]] = drawn

    wrong = each_row(world, sample, barred)
    certain(logit_processor, world, sample, wrong, "logit_processor", "no token of the last 5 tokens once more")


def test_a_touched_token_s_own_rows_do_not_hide_the_others(world: World, sample: Drawn) -> None:
    ids, times = np.unique(sample.tokens[sample.prompt :], return_counts=True)
    logits = logits_of(world, sample)
    logits[:, ids[np.argsort(-times)[:3]]] += np.array([2.0, 0.7, -1.5], np.float32)
    certain(touched_tokens, world, sample, read_off(world, sample, logits), "logit_processor", "3 tokens")


def test_a_filter_is_found_beside_another_temperature(world: World, sample: Drawn) -> None:
    def keep(p: np.ndarray) -> np.ndarray:
        among = np.where(p >= np.sort(p)[-20], p, 0.0)
        kept: np.ndarray = nucleus(0.95)(among / among.sum()) & (among > 0)
        return kept

    wrong = filtered(keep)(world, replace(sample, temperature=0.6))
    certain(truncation, world, sample, wrong, "truncated_sampling", "top_k 20", "temperature 0.6 where 0.85")


def test_a_filter_by_the_square_of_the_likeliest_is_one(world: World, sample: Drawn) -> None:
    suggestion = said(truncation, world, sample, filtered(lambda p: p >= 0.1 * p.max() ** 2)(world, sample))
    assert suggestion is not None
    assert suggestion.cause == "truncated_sampling"
    assert "top_a" in suggestion.evidence


def test_allowed_tokens_are_no_filter_of_the_likeliest(world: World, sample: Drawn) -> None:
    random = np.random.default_rng(3)

    def allowed(row: np.ndarray, end: int) -> None:
        if end % 3 == 0:
            gone = np.ones(len(row), np.bool_)
            gone[random.choice(331, 30, replace=False)] = False
            gone[sample.tokens[end]] = False
            row[gone] = -np.inf

    suggestion = said(truncation, world, sample, each_row(world, sample, allowed))
    assert suggestion is not None
    assert suggestion.cause == "logit_processor"


@pytest.mark.parametrize(("gone", "name"), [(np.s_[96:144], "96 to 143"), (np.s_[300:], "300 to 330")])
def test_a_part_of_the_vocabulary_that_is_not_in_the_sum_is_named(
    world: World, sample: Drawn, gone: slice, name: str
) -> None:
    z = (logits_of(world, sample)[:, :331] / sample.temperature).astype(np.float64)
    chosen = z[np.arange(len(z)), sample.tokens[sample.prompt :]]
    wrong = (chosen - np.log(np.exp(np.delete(z, gone, axis=1)).sum(axis=1))).astype(np.float32)
    suggestion = said(one_shard, world, sample, wrong)
    assert suggestion is not None
    assert suggestion.cause == "vocabulary"
    assert suggestion.score >= 0.99 * STRONG
    assert name in suggestion.evidence


def test_zeros_among_right_values_are_no_filter(world: World, sample: Drawn) -> None:
    wrong = world.logprobs(world.decoder(sample.version), sample)
    wrong[wrong >= np.quantile(wrong, 0.9)] = 0.0
    assert said(truncation, world, sample, wrong) is None


@pytest.mark.parametrize("largest", [True, False])
def test_shards_that_were_summed_below_their_own_maxima_are_told(world: World, sample: Drawn, largest: bool) -> None:
    z = logits_of(world, sample)[:, : world.decoder(1).config.vocab] / np.float64(sample.temperature)
    ids, rows = sample.tokens[sample.prompt :], np.arange(len(z))
    cuts = np.split(z, [192], axis=1)
    tops = np.stack([cut.max(axis=1) for cut in cuts], axis=1)
    total = np.log(sum(np.exp(cut - top[:, None]).sum(axis=1) for cut, top in zip(cuts, tops.T, strict=True)))
    top = tops.max(axis=1) if largest else tops[rows, (ids >= 192).astype(int)]
    wrong = (z[rows, ids] - top - total).astype(np.float32)
    which = "the largest maximum" if largest else "its token's shard's maximum"
    certain(
        one_shard,
        world,
        sample,
        wrong,
        "vocabulary",
        f"2 shards of 192 tokens, each below its own maximum, with {which}",
    )


def test_a_softmax_in_16_bits_is_found_step_by_step(world: World, sample: Drawn) -> None:
    z = (logits_of(world, sample)[:, :331] / np.float32(sample.temperature)).astype(np.float16)
    # NumPy's own exponential of 16 bits is another one where a CPU has such instructions.
    e = np.exp((z - z.max(axis=1, keepdims=True)).astype(np.float32)).astype(np.float16)
    p = (e / e.sum(axis=1, dtype=np.float32, keepdims=True)).astype(np.float16)
    wrong = np.log(p[np.arange(len(z)), sample.tokens[sample.prompt :]].astype(np.float32))
    certain(low_precision_head, world, sample, wrong, "bf16_head", "a softmax in fp16")


@pytest.mark.parametrize(("parts", "named"), [(5, "context_parallel"), (6, "context_parallel"), (0, "other_token")])
def test_labels_that_are_wrong_at_the_edges_of_any_number_of_slices_are_told(
    world: World, sample: Drawn, parts: int, named: str
) -> None:
    targets, total = sample.tokens[sample.prompt :].copy(), len(sample.tokens)
    edges = [round(i * total / parts) for i in range(1, parts)] if parts else [33, 41, 70]
    for edge in (edge for edge in edges if edge >= sample.prompt):
        targets[edge - sample.prompt] = (targets[edge - sample.prompt] + 9) % 331
    suggestion = said(other_token, world, sample, read_off(world, sample, logits_of(world, sample), targets))
    assert suggestion is not None
    assert suggestion.cause == named


@pytest.mark.parametrize(("off", "named"), [(0, "context_parallel"), (1, "other_token")])
def test_one_label_is_enough_where_it_is_the_first_of_its_slice(
    world: World, sample: Drawn, off: int, named: str
) -> None:
    targets, total = sample.tokens[sample.prompt :].copy(), len(sample.tokens)
    edges = [round(i * total / 3) for i in range(3)]
    (last,) = (edge for edge in edges if edge >= sample.prompt and edge != edges[1])
    targets[last - sample.prompt] = sample.tokens[edges[1] + off]
    suggestion = said(other_token, world, sample, read_off(world, sample, logits_of(world, sample), targets))
    assert suggestion is not None
    assert suggestion.cause == named


def test_a_model_s_own_defaults_are_a_penalty_a_temperature_and_filters_at_once(world: World, sample: Drawn) -> None:
    logits, hot = logits_of(world, sample), replace(sample, temperature=0.7)
    for at, row in enumerate(logits):
        end = sample.prompt + at
        seen = np.unique(sample.tokens[:end])
        row[seen] = np.where(row[seen] > 0, row[seen] / np.float32(1.05), row[seen] * np.float32(1.05))
        gone = row < np.sort(row[:331])[-20]
        gone[sample.tokens[end]] = False
        row[gone] = -np.inf
    wrong = read_off(world, hot, logits)
    words = "repetition penalty of 1.05", "top_k 20", "temperature 0.7 where 0.85"
    certain(sampler_defaults, world, sample, wrong, "truncated_sampling", *words)


def in_other_roundings(world: World, s: Drawn, keep: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Values of a filter on hidden states whose last bits are off at random."""
    decoder = world.decoder(s.version)
    hidden = decoder.hidden([s.tokens])[s.prompt - 1 : -1]
    by = np.random.default_rng(0).integers(-2, 3, hidden.shape)
    logits = decoder.reference.gemm_fp32(
        np.where(hidden & 0x7FFF, hidden + by, hidden).astype(np.uint16), head_of(decoder)
    )
    p = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float64) / s.temperature)
    for row, chances, target in zip(logits, p / p.sum(axis=1, keepdims=True), s.tokens[s.prompt :], strict=True):
        gone = ~keep(chances)
        gone[target] = False
        row[gone] = -np.inf
    return read_off(world, s, logits)


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (nucleus(0.9), "top_p 0.9"),
        (lambda p: p >= np.sort(p)[-33], "top_k 33"),
        (lambda p: p >= 0.05 * p.max(), "min_p 0.05"),
        (
            lambda p: nucleus(0.8)(np.where(p >= np.sort(p)[-20], p, 0.0) / np.sort(p)[-20:].sum()),
            "top_k 20 and top_p 0.8",
        ),
    ],
)
def test_a_filter_is_found_where_roundings_blur_it(
    world: World, sample: Drawn, keep: Callable[[np.ndarray], np.ndarray], name: str
) -> None:
    wrong = in_other_roundings(world, sample, keep)
    suggestion, other = (said(search, world, sample, wrong) for search in (blurred_filter, other_filters))
    assert suggestion is not None
    assert suggestion.cause == "truncated_sampling"
    assert f"those of {name}, but for" in suggestion.evidence
    assert other is None or other.score < suggestion.score


def test_forbidden_tokens_and_roundings_alone_are_no_blurred_filter(world: World, sample: Drawn) -> None:
    for keep in (lambda p: np.arange(len(p)) % 5 > 0, lambda p: p >= 0):
        wrong = in_other_roundings(world, sample, keep)
        off = np.abs(wrong - world.logprobs(world.decoder(sample.version), sample))
        assert off.mean() > 0.5 * rounding_noise(oracle_of(world, sample))
        assert said(blurred_filter, world, sample, wrong) is None
