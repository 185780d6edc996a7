"""Slots of the cache: what stands in which of them, for which rows, in which heads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from auditor.causes.context.blocks import unknown_block
from auditor.causes.context.front import part_of_the_prompt
from auditor.causes.context.kv import lost_blocks
from auditor.causes.context.masked import masked_in_part
from auditor.causes.context.prompt import chunk_of_the_prompt
from auditor.causes.context.routing import other_experts
from auditor.causes.context.seen import Part, attention_mask, missing, seeing, window, without
from auditor.causes.context.slots import asked
from auditor.causes.context.stepwise import row_by_row
from auditor.causes.context.stored import stored_in_fewer_bits
from auditor.causes.context.tenants import _edges, other_tenants
from auditor.causes.edits import Edit, edited
from auditor.compare import Logprobs
from auditor.faults.blind_third_ops import Native
from auditor.faults.ops import WrongKv, broken
from auditor.faults.reported import to_e4m3
from auditor.faults.suite import kv_of
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import I32, Bits, Reference
from tests.auditor.diagnosis import certain, evidence_of, oracle_of, said


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=7)


def under(world: World, s: Drawn, change: Callable[..., Any], *layers: int) -> Logprobs:
    edit = Edit("attention", change)
    return world.logprobs(edited(world.decoder(s.version), edit.at(*((at, 0) for at in layers)) if layers else edit), s)


def test_old_keys_of_one_rank_are_told_from_the_others(world: World, sample: Drawn) -> None:
    old, layer = kv_of(world, world.decoder(sample.version - 2), sample.tokens), iter((0, 1))

    def second_head(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        k, v = k.copy(), v.copy()
        for own, foreign in zip((k, v), old[next(layer)], strict=True):
            own[3:16, 1:] = foreign[3:16, 1:]
        return plain.attention(q, k, v, cu_q, cu_k)

    wrong = under(world, sample, second_head)
    version = f"of weight version {sample.version - 2}"
    certain(other_tenants, world, sample, wrong, "stale_kv", "tokens 3 to 15 on rank 1 of 2", version)


def test_a_slot_that_only_decoding_reads_wrong_is_found(world: World, sample: Drawn) -> None:
    def late(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        own = plain.attention(q, k, v, cu_q, cu_k)
        k, v = k.copy(), v.copy()
        k[23], v[23] = 0, 0
        lost = plain.attention(q, k, v, cu_q, cu_k)
        both: Any = zip(own, lost, strict=True)
        return tuple(np.concatenate([a[:24], b[24:]]) for a, b in both)

    wrong = under(world, sample, late)
    certain(other_tenants, world, sample, wrong, "kv_boundary", "token 23 set to zero", "rows from 24 on")


def test_keys_that_one_layer_does_not_see_are_told(world: World, sample: Drawn) -> None:
    wrong = under(world, sample, seeing(without(5, 11)), 1)
    certain(other_tenants, world, sample, wrong, "attention_mask", "nothing sees", "tokens 5 to 10 in layer 1")


def test_blocks_in_each_others_place_are_told(world: World, sample: Drawn) -> None:
    order = np.r_[8:16, 0:8, 16:96]

    def read(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        there = order[: len(k)]
        return plain.attention(q, k[there], v[there], cu_q, cu_k)

    wrong = under(world, sample, read)
    certain(lost_blocks, world, sample, wrong, "kv_boundary", "tokens 0 to 15", "in each other's place")


def test_a_mask_that_does_not_know_of_the_cached_prefix_is_told(world: World, sample: Drawn) -> None:
    def from_the_left(count: int) -> list[Part]:
        rows = [(0, 16, np.arange(16)), *((i, i + 1, np.arange(i - 15)) for i in range(16, min(24, count)))]
        return rows + ([(24, count, np.arange(count))] if count > 24 else [])

    wrong = under(world, sample, seeing(from_the_left))
    certain(chunk_of_the_prompt, world, sample, wrong, "attention_mask", "tokens 16 to 23", "top left")


def test_keys_of_no_whole_block_were_hidden_on_purpose(world: World, sample: Drawn) -> None:
    wrong = under(world, sample, seeing(without(44, 57)))
    certain(row_by_row, world, sample, wrong, "attention_mask", "do not see tokens 44 to 56")
    wrong = under(world, sample, seeing(without(40, 56)))
    certain(row_by_row, world, sample, wrong, "kv_boundary", "do not see tokens 40 to 55")


def test_a_step_of_a_ring_of_six_is_missed(world: World, sample: Drawn) -> None:
    wrong = under(world, sample, seeing(missing([0, 16, 32, 48, 64, 80, 96], 2)))
    certain(row_by_row, world, sample, wrong, "context_parallel", "do not see tokens 0 to 15")


def test_a_context_that_drops_its_front_is_cut_from_there_on(world: World, sample: Drawn) -> None:
    values, decoder = world.logprobs(world.decoder(sample.version), sample).copy(), world.decoder(sample.version)
    cut = replace(sample, tokens=sample.tokens[32:], prompt=80 - 32)
    values[80 - 24 :] = world.logprobs(decoder, cut)
    certain(part_of_the_prompt, world, sample, values, "truncation", "without its tokens 0 to 31, from token 79 on")


def test_other_experts_in_the_prompt_alone_are_routing(world: World, sample: Drawn) -> None:
    evidence = evidence_of(world, sample, world.logprobs(world.decoder(1), sample))
    usual = np.tile(np.array([0, 1], np.uint16), (len(sample.tokens), 1))
    moved = usual.copy()
    moved[:16, 1] = 2
    records = replace(evidence.rollout, routed_experts=usual), replace(evidence.trainer, routed_experts=moved)
    (suggestion,) = other_experts(replace(evidence, rollout=records[0], trainer=records[1]))
    assert suggestion.cause == "routing"
    assert "16 went elsewhere" in suggestion.evidence


def held(rounded: Callable[[np.ndarray], np.ndarray], since: int = 0, keys_only: bool = False) -> Callable[..., Any]:
    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        own = plain.attention(q, k, v, cu_q, cu_k)
        k, v = to_bf16(rounded(from_bf16(k))), v if keys_only else to_bf16(rounded(from_bf16(v)))
        both: Any = zip(own, plain.attention(q, k, v, cu_q, cu_k), strict=True)
        return tuple(np.concatenate([a[:since], b[since:]]) for a, b in both)

    return attention


def clipped(x: np.ndarray) -> np.ndarray:
    scale = np.float32(np.quantile(np.abs(x), 0.98) / 448)
    return (to_e4m3(x / scale) * scale).astype(np.float32)


def test_caches_in_fewer_bits_are_told_with_their_scale_layer_and_readers(world: World, sample: Drawn) -> None:
    wrong = under(world, sample, held(clipped))
    certain(stored_in_fewer_bits, world, sample, wrong, "kv_precision", "a tensor that clips the largest 2 %")
    wrong = under(world, sample, held(lambda x: to_e4m3(x / 16) * 16, keys_only=True), 0)
    certain(stored_in_fewer_bits, world, sample, wrong, "kv_precision", "keys of", "in layer 0 in FP8", "a scale of 16")
    wrong = under(world, sample, held(to_e4m3, since=sample.prompt))
    certain(stored_in_fewer_bits, world, sample, wrong, "kv_precision", "without a scale, as rows from 24 on")


def test_a_scale_that_nobody_guesses_is_told_by_where_it_points(world: World, sample: Drawn) -> None:
    wrong = under(world, sample, held(lambda x: to_e4m3(np.clip(x, -2.6, 2.6) * 172) / 172))
    suggestion = said(stored_in_fewer_bits, world, sample, wrong)
    assert suggestion is not None
    assert (suggestion.cause, suggestion.score > 0.45) == ("kv_precision", True)


def test_an_engine_s_own_arithmetic_is_no_cache_in_fewer_bits(world: World, sample: Drawn) -> None:
    decoder = world.decoder(sample.version)
    native = world.logprobs(replace(decoder, reference=broken(Native, decoder.reference)), sample)
    for search in (stored_in_fewer_bits, other_tenants):
        assert said(search, world, sample, native) is None


def test_slices_that_are_merged_without_their_weights_are_context_parallel(world: World, sample: Drawn) -> None:
    def unweighted(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        out, m, l = plain.attention(q, k, v, cu_q, cu_k)
        for row in range(48, len(q)):
            parts = [
                plain.attention(
                    q[row : row + 1], k[a:b].copy(), v[a:b].copy(), *(np.array([0, n], np.int32) for n in (1, b - a))
                )
                for a, b in ((0, 48), (48, row + 1))
            ]
            out[row] = to_bf16((from_bf16(parts[0][0][0]) + from_bf16(parts[1][0][0])) * np.float32(0.5))
        return out, m, l

    suggestion = said(attention_mask, world, sample, under(world, sample, unweighted))
    assert suggestion is not None
    assert (suggestion.cause, suggestion.score > 0.8) == ("context_parallel", True)
    assert "2 slices' keys give is put together as if each weighed the same" in suggestion.evidence


def test_a_window_on_one_rank_in_one_layer_is_told(world: World, sample: Drawn) -> None:
    def second_head(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        both: Any = zip(
            *(change(plain, q, k, v, cu_q, cu_k) for change in (Reference.attention, seeing(window(20)))), strict=True
        )
        return tuple(np.concatenate([a[:, :2], b[:, 2:]], axis=1) for a, b in both)

    wrong = under(world, sample, second_head, 1)
    certain(masked_in_part, world, sample, wrong, "attention_mask", "on rank 1 of 2 in layer 1, tokens see 20 back")


def test_short_windows_are_told_where_the_model_cannot_be_run_back(
    world: World, sample: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.causes.context.slots.response_of", lambda oracle, rows: None)
    wrong = under(world, sample, seeing(window(18)), 0)
    certain(masked_in_part, world, sample, wrong, "attention_mask", "in layers 0, tokens see 18 back")
    wrong = with_old_block(world, sample)
    certain(other_tenants, world, sample, wrong, "stale_kv", "tokens 16 to 31 of weight version")


def with_old_block(world: World, sample: Drawn) -> Logprobs:
    old, layer = kv_of(world, world.decoder(sample.version - 1), sample.tokens), iter((0, 1))

    def block(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        k, v = k.copy(), v.copy()
        for own, foreign in zip((k, v), old[next(layer)], strict=True):
            own[16:32] = foreign[16:32]
        return plain.attention(q, k, v, cu_q, cu_k)

    return under(world, sample, block)


def test_slots_that_decoding_reads_twice_are_told(world: World, sample: Drawn) -> None:
    def again(count: int) -> list[Part]:
        rows = [(0, 24, np.arange(24)), (24, count, np.r_[0:24, 16:24, 24:count])]
        return [part for part in rows if part[0] < part[1] <= count]

    wrong = under(world, sample, seeing(again))
    certain(other_tenants, world, sample, wrong, "kv_boundary", "tokens 16 to 23 are there twice")


def test_what_nothing_fits_is_told_to_stand_in_the_prompt_or_everywhere(world: World, sample: Drawn) -> None:
    tokens, decoder = sample.tokens.copy(), world.decoder(sample.version)
    tokens[8:12] = (tokens[8:12] + 57) % 331
    other_words = world.logprobs(decoder, replace(sample, tokens=tokens))
    weights = {n: np.roll(w, 3, axis=0) if "layers.1.mlp.up_proj" in n else w for n, w in decoder.weights.items()}
    for wrong, cause in (
        (other_words, "other_context"),
        (world.logprobs(world.with_weights(weights), sample), "other_weights"),
    ):
        suggestion = said(other_tenants, world, sample, wrong)
        assert suggestion is not None
        assert (suggestion.cause, suggestion.score) == (cause, 0.43)


def test_slots_behind_the_rows_that_are_asked_for_end_no_search(
    world: World, sample: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a dear model a few rows are run back, and the last of them may stand in front of slots that are told apart."""
    monkeypatch.setattr("auditor.causes.weights.response._DEAREST", 4e9)
    layers = kv_of(world, world.decoder(sample.version - 2), sample.tokens)
    wrong = world.logprobs(world.decoder(sample.version), sample).copy()
    wrong[30:] = under(world, sample, old_from(layers, 50))[30:]
    oracle, evidence = oracle_of(world, sample), evidence_of(world, sample, wrong)
    rows, response = asked(evidence, oracle)
    assert response is not None
    edges, _ = _edges(evidence, oracle)
    assert edges[-1] > oracle.rows[rows[-1]] + 1
    assert list(other_tenants(evidence, oracle)) is not None


def old_from(layers: Any, first: int) -> Callable[..., Any]:
    each = iter(layers * 2)

    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        k, v = k.copy(), v.copy()
        for own, foreign in zip((k, v), next(each), strict=True):
            own[first : first + 4] = foreign[first : first + 4]
        return plain.attention(q, k, v, cu_q, cu_k)

    return attention


@pytest.mark.parametrize(
    ("change", "cause", "words"), [("block", "kv_boundary", "tokens 16 to 23"), ("date", "other_context", "10 to 13")]
)
def test_a_block_that_holds_what_nobody_knows_is_told_from_other_tokens_by_what_hiding_it_does(
    world: World, sample: Drawn, change: str, cause: str, words: str
) -> None:
    decoder, tokens = world.decoder(sample.version), sample.tokens.copy()
    if change == "block":
        layers = kv_of(world, decoder, np.random.default_rng(2).permutation(tokens))
        ops = broken(WrongKv, decoder.reference, layers=layers, first=16, last=24)
        wrong = world.logprobs(replace(decoder, reference=ops), sample)
    else:
        tokens[10:14] = (tokens[10:14] * 7 + 11) % 331
        wrong = world.logprobs(decoder, replace(sample, tokens=tokens))
    suggestion = said(unknown_block, world, sample, wrong)
    assert suggestion is not None
    assert (suggestion.cause, words in suggestion.evidence) == (cause, True), suggestion
    stale = world.logprobs(world.decoder(sample.version - 3), sample)
    assert said(unknown_block, world, sample, stale) is None
