"""What the causes are made of: each is right of the fault that it is for, down to the place, and says nothing else."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.causes.computation.precision import low_precision
from auditor.causes.computation.variants import other_model
from auditor.causes.context.kv import lost_blocks
from auditor.causes.context.rope import rope
from auditor.causes.context.seen import ahead, attention_mask, seeing, window
from auditor.causes.context.stored import stored_in_fewer_bits
from auditor.causes.context.tenants import other_tenants
from auditor.causes.distribution.softmax import touched_tokens
from auditor.causes.distribution.temperature import temperature
from auditor.causes.distribution.truncation import truncation
from auditor.causes.edits import Edit, edited, places
from auditor.causes.evidence import CERTAIN, IN_PART, Evidence, Suggestion
from auditor.causes.inputs import cause_of_failure
from auditor.causes.oracle import Oracle
from auditor.causes.patterns import begins_somewhere, boundary, flat_last_bits, trend
from auditor.causes.sample import Weights, diagnose_pair, diagnose_sample
from auditor.causes.steps import two_steps
from auditor.causes.table import LOOKS_LIKE, ranked
from auditor.causes.weights.versions import mixed_weights
from auditor.compare import Logprobs
from auditor.contracts import known_contracts
from auditor.faults.suite import Break, filtered, logits_of, read_off, rotated
from auditor.faults.world import VERSIONS, Drawn, World, from_bf16, to_bf16
from auditor.judge import ReferenceLogprobs
from auditor.preconditions import first_failure
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Bits, Reference
from tests.auditor.diagnosis import certain, evidence_of, said
from tests.auditor.samples import RESPONSE, pair


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=5)


def changed(world: World, sample: Drawn, change: Callable[[str, Bits, Bits], Bits], version: int) -> Logprobs:
    """Under weights made of the sample's own and another version's, tensor by tensor."""
    own, other = world.decoder(sample.version).weights, world.decoder(version).weights
    return world.logprobs(world.with_weights({n: change(n, w, other[n]) for n, w in own.items()}), sample)


def under(edit: Edit) -> Break:
    return lambda world, s: world.logprobs(edited(world.decoder(s.version), edit), s)


def doubled(plain: object, x: Bits) -> Bits:
    return to_bf16(2 * from_bf16(plain.swiglu(x)))  # type: ignore[attr-defined]


def observed(decoder: Decoder, tokens: np.ndarray) -> dict[str, Bits]:
    seen: dict[str, Bits] = {}

    def see(name: str, value: Bits) -> None:
        seen[name] = value.copy()

    decoder.hidden([tokens], see)
    return seen


def test_an_edit_changes_its_op_at_its_place_from_its_token_on_and_nothing_before(world: World, sample: Drawn) -> None:
    decoder = world.decoder(sample.version)
    right = observed(decoder, sample.tokens)
    there = edited(decoder, replace(Edit("swiglu", doubled).at((1, 0)), first=30))
    for _ in range(2):  # a decoder that runs again starts over
        wrong = observed(there, sample.tokens)
        first = next(name for name in right if right[name].tobytes() != wrong[name].tobytes())
        assert first == "layers.1.swiglu"
        assert right[first][:30].tobytes() == wrong[first][:30].tobytes()
        assert (right[first][30:] != wrong[first][30:]).mean() > 0.5
    assert len(places(decoder, "rms_norm")) == 4 * decoder.config.layers + 1
    assert edited(decoder).logprobs([sample.tokens], [24])[0].tobytes() == world_logprobs(decoder, sample)


def world_logprobs(decoder: Decoder, sample: Drawn) -> bytes:
    return decoder.logprobs([sample.tokens], [sample.prompt])[0].tobytes()


def test_a_change_in_one_place_is_found_there(world: World, sample: Drawn) -> None:
    edit = Edit("rms_norm", lambda plain, x, w, eps: plain.rms_norm(x, w, 1e-4)).at((0, 0))
    certain(other_model, world, sample, under(edit)(world, sample), "model_config", "epsilon 0.0001", "place 0.0 only")


def test_tensors_that_an_update_left_out_are_named_one_by_one(world: World, sample: Drawn) -> None:
    names = sorted(world.decoder(1).weights)
    for old in (names[7:9], names[3::4]):
        wrong = changed(world, sample, lambda n, w, other, old=old: other if n in old else w, sample.version - 1)  # type: ignore[misc]
        suggestion = said(mixed_weights, world, sample, wrong)
        assert suggestion is not None
        assert (suggestion.cause, suggestion.score) == ("stale_weights", CERTAIN)
        assert old[0] in suggestion.evidence
        assert f"of version {sample.version - 1}" in suggestion.evidence


def test_a_share_of_an_update_is_found_in_all_tensors_and_in_a_block(world: World, sample: Drawn) -> None:
    def moved(own: Bits, other: Bits, share: float) -> Bits:
        start = from_bf16(other)
        return to_bf16(start + np.float32(share) * (from_bf16(own) - start))

    for share, part in ((0.6, ""), (2.0, ".mlp.")):
        wrong = changed(world, sample, lambda n, w, o, p=part, s=share: moved(w, o, s) if p in n else w, 1)  # type: ignore[misc]
        certain(mixed_weights, world, sample, wrong, "adapter_scale", f"{share:g} times what came since")


def test_one_rank_s_part_of_an_update_is_found_and_its_vocabulary_is_whole_tiles(world: World, sample: Drawn) -> None:
    def second_of_two(name: str, own: Bits, other: Bits) -> Bits:
        if own.ndim == 1:
            return own
        mixed, column = own.copy(), "o_proj" in name or "down_proj" in name
        half = 192 if len(own) == 331 else own.shape[column] // 2
        where = np.s_[:, half:] if column else np.s_[half:]
        mixed[where] = other[where]
        return mixed

    wrong = changed(world, sample, second_of_two, sample.version - 1)
    certain(mixed_weights, world, sample, wrong, "stale_weights", "the part of rank 1 of 2")


def test_eight_bits_are_found_with_their_scale_and_on_what_they_were(
    world: World, sample: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def int8(bits: Bits, axes: tuple[int, ...]) -> Bits:
        x = from_bf16(bits)
        scale = np.abs(x).max(axis=axes, keepdims=True) / np.float32(127)
        return to_bf16((np.rint(x / scale) * scale).astype(np.float32))

    for axes, name in (((2,), "a token and head"), ((0, 2), "a head")):
        edit = Edit("attention", lambda plain, q, k, v, *ends, a=axes: plain.attention(q, int8(k, a), v, *ends))
        wrong = under(edit)(world, sample)
        certain(stored_in_fewer_bits, world, sample, wrong, "kv_precision", "keys of", "in 8-bit integers", name)
        with monkeypatch.context() as too_large:
            too_large.setattr("auditor.causes.context.slots.response_of", lambda oracle, rows: None)
            certain(low_precision, world, sample, wrong, "kv_precision", "keys in 8-bit integers", name)
    both = Edit("gemm", lambda plain, x, w, segments=1: plain.gemm(int8(x, (1,)), int8(w, (1,)), segments=segments))
    wrong = under(both)(world, sample)
    with monkeypatch.context() as too_large:
        too_large.setattr("auditor.causes.weights.mixture.response_of", lambda oracle, rows: None)
        certain(low_precision, world, sample, wrong, "activation_precision", "products in 8-bit")


def test_masks_are_told_apart_and_found_in_one_layer(world: World, sample: Drawn) -> None:
    for mask, name in ((ahead(1), "sees the one after it"), (window(40), "see 40 back")):
        edit = Edit("attention", seeing(mask))
        certain(attention_mask, world, sample, under(edit)(world, sample), "attention_mask", name)
    there = Edit("attention", seeing(window(32))).at((1, 0))
    certain(attention_mask, world, sample, under(there)(world, sample), "attention_mask", "in layers 1,", "see 32 back")


def test_positions_that_skip_some_from_a_token_on_are_found_where_the_values_go_wrong(
    world: World, sample: Drawn
) -> None:
    skipped = rotated(lambda w, s, p, f: (np.where(p >= 50, p + 6, p), f))(world, sample)
    certain(rope, world, sample, skipped, "position_offset", "from token 50 on moved by +6")


def test_a_scaling_that_depends_on_two_numbers_is_climbed_to(world: World, sample: Drawn) -> None:
    def llama(w: World, s: Drawn, p: np.ndarray, f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        blend = np.clip((256 * f / (2 * np.pi) - 1) / 3, 0, 1)
        return p, f * (blend + (1 - blend) / 32)

    certain(rope, world, sample, rotated(llama)(world, sample), "rope_scaling", "Llama 3 scaling by 32 of 256")


def test_a_cache_block_that_holds_another_one_is_named_and_old_values_alone_too(world: World, sample: Drawn) -> None:
    def behind(plain: object, q: Bits, k: Bits, v: Bits, *ends: np.ndarray) -> object:
        k, v = k.copy(), v.copy()
        k[48:64], v[48:64] = k[32:48].copy(), v[32:48].copy()
        return plain.attention(q, k, v, *ends)  # type: ignore[attr-defined]

    wrong = under(Edit("attention", behind))(world, sample)
    certain(lost_blocks, world, sample, wrong, "kv_boundary", "tokens 48 to 63", "block before")

    caches: list[Bits] = []

    def keep(plain: object, q: Bits, k: Bits, v: Bits, *ends: np.ndarray) -> object:
        caches.append(v.copy())
        return plain.attention(q, k, v, *ends)  # type: ignore[attr-defined]

    under(Edit("attention", keep))(world, replace(sample, version=sample.version - 1))
    at = iter(range(len(caches)))

    def stale(plain: object, q: Bits, k: Bits, v: Bits, *ends: np.ndarray) -> object:
        v = v.copy()
        v[: sample.prompt] = caches[next(at)][: sample.prompt]
        return plain.attention(q, k, v, *ends)  # type: ignore[attr-defined]

    wrong = under(Edit("attention", stale))(world, sample)
    certain(other_tenants, world, sample, wrong, "stale_kv", "values of tokens 0 to")


def test_a_temperature_that_changes_as_it_goes_is_told(world: World, sample: Drawn) -> None:
    decoder, logits = world.decoder(sample.version), logits_of(world, sample)
    heats = np.linspace(0.8, 1.6, len(logits)).astype(np.float32)
    ids = sample.tokens[sample.prompt :][:, None]
    wrong = decoder.reference.logp_from_logits(logits, ids, heats, vocab=decoder.config.vocab)[0][:, 0]
    suggestion = said(temperature, world, sample, wrong)
    assert suggestion is not None
    assert suggestion.cause == "temperature"
    assert "of its own" in suggestion.evidence
    dropped = np.random.default_rng(1).permutation(world.logprobs(decoder, sample))
    assert said(temperature, world, sample, dropped) is None


def test_a_few_tokens_moved_are_named_and_padding_is_not_taken_for_tokens(world: World, sample: Drawn) -> None:
    logits = logits_of(world, sample)
    drawn = np.unique(sample.tokens[sample.prompt :])[:3]
    logits[:, drawn] += np.float32(1.5)
    wrong = read_off(world, sample, logits)
    certain(touched_tokens, world, sample, wrong, "logit_processor", "3 tokens")
    vocab = world.decoder(1).config.vocab
    z = logits_of(world, sample)[:, :vocab].astype(np.float64) / sample.temperature
    lse = np.log(np.exp(z).sum(axis=1) + 7.0)
    padded = (z[np.arange(len(z)), sample.tokens[sample.prompt :]] - lse).astype(np.float32)
    suggestion = said(touched_tokens, world, sample, padded)
    assert suggestion is not None
    assert suggestion.cause == "vocabulary"
    assert "7.0 more" in suggestion.evidence
    divided = world.logprobs(world.decoder(sample.version), sample, 1.0) / np.float32(sample.temperature)
    assert said(touched_tokens, world, sample, divided) is None


def test_a_filter_that_was_chosen_at_another_temperature_is_named_with_it(world: World, sample: Drawn) -> None:
    hot = replace(sample, temperature=0.6)

    def keep(p: np.ndarray) -> np.ndarray:
        raw = p**0.6 / (p**0.6).sum()
        order = np.argsort(-raw)
        kept = np.zeros(len(p), np.bool_)
        kept[order[: int(np.searchsorted(np.cumsum(raw[order]), 0.9)) + 1]] = True
        return kept

    suggestion = said(truncation, world, hot, filtered(keep)(world, hot))
    assert suggestion is not None
    assert suggestion.cause == "truncated_sampling"
    assert "at temperature 1" in suggestion.evidence


def test_two_temperatures_in_one_response_are_two_pieces_of_one_cause(world: World, sample: Drawn) -> None:
    decoder = world.decoder(sample.version)
    halves = [world.logprobs(decoder, sample, heat) for heat in (0.5, 1.5)]
    suggestion = diagnosed(world, sample, np.where(np.arange(72) % 2, *halves).astype(np.float32))  # type: ignore[attr-defined]
    assert (suggestion.cause, suggestion.score) == ("temperature", IN_PART)
    assert "temperature 0.5" in suggestion.evidence
    assert "temperature 1.5" in suggestion.evidence


def test_a_step_upon_another_is_told_with_what_it_stands_upon(world: World, sample: Drawn) -> None:
    stale = world.logprobs(world.decoder(sample.version - 1), sample)
    rolled = said(two_steps, world, sample, np.roll(stale, 1))
    assert rolled is not None
    assert rolled.cause == "off_by_one"
    assert f"weight version {sample.version - 1}" in rolled.evidence
    heated = world.logprobs(world.decoder(sample.version - 1), sample, 1.4)
    certain(two_steps, world, sample, heated, "temperature", "temperature 1.4", f"weight version {sample.version - 1}")


def diagnosed(world: World, sample: Drawn, wrong: Logprobs) -> Suggestion:
    rollout, trainer = world.records(sample)
    reference = ReferenceLogprobs(trainer.logprobs, trainer.logprobs, "fma32")
    weights = Weights(world.decoder(sample.version), range(1, VERSIONS + 1), world.decoder)
    return diagnose_sample(replace(rollout, logprobs=wrong), trainer, reference, weights)[0]


def values(change: Callable[[np.ndarray], np.ndarray]) -> Suggestion:
    rollout, trainer = pair()
    wrong = change(rollout.logprobs.astype(np.float64)).astype(np.float32)
    return diagnose_pair(replace(rollout, logprobs=wrong), trainer)[0]


@pytest.mark.parametrize(
    ("change", "cause", "word"),
    [
        (lambda x: np.convolve(x, [0.25, 0.5, 0.25], "same"), "value_transform", "neighbours"),
        (lambda x: np.cumsum(x[::-1])[::-1], "value_transform", "sums to the last token"),
        (lambda x: x * 0.99 ** np.arange(len(x)), "value_transform", "as the one before"),
        (lambda x: np.round(x, 3), "value_transform", "at most 3 decimals"),
        (lambda x: np.full(len(x), x.mean()), "value_transform", "the mean of the reference's"),
        (lambda x: np.where(np.arange(len(x)) < 16, x, 2 * x), "value_transform", "at 16 tokens of 32"),
        (lambda x: x[::-1], "value_order", "another order"),
        (lambda x: np.repeat(x[::2], 2), "off_by_one", "the token 1 before"),
        (lambda x: np.concatenate([x[:10], x[18:], np.zeros(8)]), "value_order", "from 10 those of 18 on"),
        (lambda x: np.roll(x, 5), "off_by_one", "5 token(s) later"),
        (lambda x: np.append(x[:-4], [-1.0] * 4), "filler", "exactly -1 at 4"),
    ],
)
def test_values_made_of_right_ones_are_told_by_how(
    change: Callable[[np.ndarray], np.ndarray], cause: str, word: str
) -> None:
    suggestion = values(change)
    assert suggestion.cause == cause
    assert word in suggestion.evidence


def test_decimals_that_fp32_has_by_itself_are_no_rounding() -> None:
    right = np.linspace(-4.4, -4.1, RESPONSE).astype(np.float32)
    rollout, trainer = (replace(record, logprobs=right) for record in pair())
    moved = replace(rollout, logprobs=(right + 2 * np.spacing(right)).astype(np.float32))
    assert "value_transform" not in {suggestion.cause for suggestion in diagnose_pair(moved, trainer)}


def test_what_nothing_explains_is_named_by_its_course_and_by_what_rounding_makes(world: World, sample: Drawn) -> None:
    tokens = sample.tokens.copy()
    tokens[: sample.prompt] = np.random.default_rng(0).integers(0, 331, sample.prompt)
    wrong = world.logprobs(world.decoder(sample.version), replace(sample, tokens=tokens))
    evidence = evidence_of(world, sample, wrong)
    assert [suggestion.cause for suggestion in trend(evidence, 0.01)] == ["other_context"]
    flat = evidence_of(world, sample, (evidence.truth + np.float32(0.02) * (-1) ** np.arange(72)).astype(np.float32))
    assert list(trend(flat, 0.001)) == []
    assert [suggestion.cause for suggestion in flat_last_bits(flat, 0.02)] == ["reduction_order"]
    assert list(flat_last_bits(flat, 0.005)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = replace(flat, active=np.arange(72) == 5)
        assert [suggestion.cause for suggestion in flat_last_bits(one, 0.02)] == ["reduction_order"]
    late = evidence_of(world, sample, np.concatenate([evidence.truth[:40], wrong[40:]]))
    assert [suggestion.cause for suggestion in begins_somewhere(late, 0.01)] == ["kv_boundary"]
    assert list(begins_somewhere(evidence, 0.01)) == []


def test_what_begins_at_a_block_is_a_cache_unless_it_is_no_larger_than_rounding(world: World, sample: Drawn) -> None:
    truth = world.logprobs(world.decoder(sample.version), sample)
    start = 48 + 1 - sample.prompt  # the value that the row at position 48 gives
    for size, first in ((0.01, "reduction_order"), (0.04, "kv_boundary")):
        wrong = truth.copy()
        wrong[start:] += np.float32(size) * (-1) ** np.arange(len(truth) - start)
        evidence = evidence_of(world, sample, wrong)
        found = [*boundary(evidence, 0.015), *flat_last_bits(evidence, 0.015)]
        assert ranked(found)[0].cause == first


def test_a_native_run_of_two_stock_engines_is_named_by_its_order_of_sums() -> None:
    """Values of stock vLLM beside stock Megatron-core, both off the reference by their kernels only."""
    stored = np.load(Path(__file__).parent / "data" / "native_run.npz")
    rollouts, trainers, references = (stored[name][:, :RESPONSE] for name in ("rollout", "trainer", "reference"))
    for sides, truth, noise in zip(zip(rollouts, trainers, strict=True), references, stored["noise"], strict=True):
        rollout, trainer = (replace(r, logprobs=values) for r, values in zip(pair(), sides, strict=True))
        for record in (rollout, trainer):
            evidence = Evidence(record.logprobs, truth, record.mask, record, rollout, trainer)
            found = [said for looks_like in LOOKS_LIKE for said in looks_like(evidence, float(noise))]
            assert ranked(found)[0].cause == "reduction_order"


def test_where_neither_side_computes_as_the_reference_rounding_is_named_and_soon(
    world: World, sample: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def coarse(parts: int) -> Edit:
        def gemm(plain: Reference, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
            size = -(-x.shape[1] // parts)
            cuts = [np.s_[:, at : at + size] for at in range(0, x.shape[1], size)]
            total, *rest = (from_bf16(plain.gemm(x[cut].copy(), w[cut].copy())) for cut in cuts)
            for part in rest:
                total = from_bf16(to_bf16(total + part))
            return to_bf16(total)

        return Edit("gemm", gemm)

    rollout, trainer = world.records(sample)
    reference = ReferenceLogprobs(trainer.logprobs, trainer.logprobs, "fma32")
    sides = [under(coarse(parts))(world, sample) for parts in (5, 7)]
    forwards, hidden = 0, Oracle.hidden

    def counted(self: Oracle, *args: Any) -> Bits:
        nonlocal forwards
        forwards += 1
        return hidden(self, *args)

    monkeypatch.setattr(Oracle, "hidden", counted)
    weights = Weights(world.decoder(sample.version), range(1, VERSIONS + 1), world.decoder)
    rollout, trainer = replace(rollout, logprobs=sides[0]), replace(trainer, logprobs=sides[1])
    assert diagnose_sample(rollout, trainer, reference, weights)[0].cause == "reduction_order"
    assert forwards < 2 * 24


def test_tokens_that_lack_their_beginning_are_truncated_and_not_cut_anew(world: World, sample: Drawn) -> None:
    rollout, trainer = world.records(sample)
    shorter = rollout.tokens[8:]
    kept = {"tokens": shorter, "token_count": len(shorter), "tokens_digest": "", "prompt_len": 16}
    other = replace(trainer, **kept)  # type: ignore[arg-type]
    failure = first_failure(rollout, other, known_contracts())
    assert failure is not None
    assert cause_of_failure(failure, rollout, other).cause == "truncation"
