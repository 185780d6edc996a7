"""What a row saw, and where it stood: prompts, masks, positions and rotations are told down to the token."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from auditor.causes.computation.variants import other_model
from auditor.causes.context.inserted import more_in_between
from auditor.causes.context.kv import stale_kv
from auditor.causes.context.masked import masked_in_part
from auditor.causes.context.prompt import alone, chunk_of_the_prompt, one_more_token, other_prompt
from auditor.causes.context.rope import rope
from auditor.causes.context.seen import (
    Mask,
    Part,
    attention_mask,
    missing,
    of_ranks,
    seeing,
    slices,
    window,
    without_keys,
)
from auditor.causes.context.stepwise import row_by_row
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import HINT
from auditor.causes.inputs import cause_of_failure
from auditor.compare import Logprobs
from auditor.contracts import known_contracts
from auditor.faults.ops import Kv, WrongKv, broken
from auditor.faults.suite import kv_of, rotated
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from auditor.preconditions import first_failure
from rl_kernel.reference.ops import I32, Bits, Reference
from tests.auditor.diagnosis import certain, evidence_of, said
from tests.auditor.samples import pair

Turns = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=7)


def under(world: World, s: Drawn, mask: Mask, *layers: int) -> Logprobs:
    edit = Edit("attention", seeing(mask))
    return world.logprobs(edited(world.decoder(s.version), edit.at(*((at, 0) for at in layers)) if layers else edit), s)


def positions(world: World, s: Drawn, change: Turns) -> Logprobs:
    return rotated(lambda w, _s, p, f: (change(p), f))(world, s)


def of_tokens(world: World, s: Drawn, tokens: np.ndarray) -> Logprobs:
    prompt = s.prompt + len(tokens) - len(s.tokens)
    return world.logprobs(world.decoder(s.version), replace(s, tokens=tokens, prompt=prompt))


def hidden_for_a_while(count: int) -> list[Part]:
    """Rows 50 to 69 do not see keys 30 to 34."""
    rows = [(0, 50, np.arange(50)), (50, 70, np.r_[0:30, 35:70]), (70, count, np.arange(count))]
    return [part for part in rows if part[0] < count]


def test_positions_are_followed_row_by_row_however_they_jump(world: World, sample: Drawn) -> None:
    wrong = positions(world, sample, lambda p: p + 5 * (p >= 40) - 12 * (p >= 61))
    certain(row_by_row, world, sample, wrong, "position_offset", "by +5 from token 40", "by -7 from token 61")
    still = positions(world, sample, lambda p: p - np.clip(p - 45, 0, 9))
    certain(row_by_row, world, sample, still, "position_offset", "by -1 from token 46")


@pytest.mark.parametrize(
    ("end", "said_of_it"), [(24, "from token 16 of the prompt to its end"), (96, "from token 16 on")]
)
def test_positions_that_start_over_behind_a_cached_prefix_are_told(
    world: World, sample: Drawn, end: int, said_of_it: str
) -> None:
    wrong = positions(world, sample, lambda p: np.where((p >= 16) & (p < end), p - 16, p))
    certain(rope, world, sample, wrong, "position_offset", said_of_it, "cached prefix")


def test_norms_behind_the_rotation_are_another_model(world: World, sample: Drawn) -> None:
    waiting: list[tuple[Bits, float]] = []

    def norm(plain: Reference, x: Bits, w: Bits, eps: float) -> Bits:
        return plain.rms_norm(x, w, eps) if x.ndim == 2 else (waiting.append((w, eps)), x)[1]

    def turn(plain: Reference, x: Bits, *angles: np.ndarray) -> Bits:
        return plain.rms_norm(plain.rope(x, *angles), *waiting.pop(0))

    broken_norms = edited(world.decoder(sample.version), Edit("rms_norm", norm), Edit("rope", turn))
    certain(other_model, world, sample, world.logprobs(broken_norms, sample), "model_config", "normalised then")


def test_positions_that_ranks_count_by_themselves_are_context_parallel(world: World, sample: Drawn) -> None:
    spans = np.split(np.arange(96), 8)
    order = np.concatenate([spans[at] for at in (0, 7, 1, 6, 2, 5, 3, 4)])

    def placed(p: np.ndarray) -> np.ndarray:
        moved = p.copy()
        moved[order] = p
        return moved

    wrong = positions(world, sample, placed)
    certain(rope, world, sample, wrong, "context_parallel", "in the order of 4 ranks' slices")


def test_tokens_of_the_prompt_at_one_position_are_found(world: World, sample: Drawn) -> None:
    wrong = positions(world, sample, lambda p: p - np.clip(p - 4, 0, 5))
    certain(rope, world, sample, wrong, "position_offset", "from token 5 on standing still for 5 tokens")


def test_keys_that_some_rows_do_not_see_are_found_with_those_rows(world: World, sample: Drawn) -> None:
    wrong = under(world, sample, hidden_for_a_while)
    certain(row_by_row, world, sample, wrong, "attention_mask", "from 50 to 69 do not see tokens 30 to 34")
    chunk = under(world, sample, alone(64, 80))
    certain(row_by_row, world, sample, chunk, "kv_boundary", "from 64 to 79 do not see tokens 0 to 63")
    slices = under(world, sample, missing([0, 24, 48, 72, 96], 2))
    certain(row_by_row, world, sample, slices, "context_parallel", "do not see tokens 0 to 23")


def test_rotations_that_change_at_a_token_are_named_by_their_factors(world: World, sample: Drawn) -> None:
    decoder = world.decoder(sample.version)
    at, own = np.arange(96.0)[:, None], 10_000.0 ** (-np.arange(0, 32, 2) / 32)
    angle = np.where(at < 48, at * own, at * own / np.linspace(1, 4, 16))
    table = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    wrong = world.logprobs(replace(decoder, rope=table), sample)
    certain(row_by_row, world, sample, wrong, "rope_scaling", "factors from 1 to 4, from token 48 on")


def test_another_token_in_the_prompt_is_found_where_it_stands(world: World, sample: Drawn) -> None:
    for at, search in ((0, other_prompt), (13, other_prompt), (23, row_by_row)):
        tokens = sample.tokens.copy()
        tokens[at] = (tokens[at] + 7) % 331
        wrong = of_tokens(world, sample, tokens)
        certain(search, world, sample, wrong, "other_context", f"token {tokens[at]} in the place of", f"{at}")


def test_one_token_more_in_front_is_found(world: World, sample: Drawn) -> None:
    for token, search in ((1, other_prompt), (57, one_more_token)):
        wrong = of_tokens(world, sample, np.append(token, sample.tokens))
        certain(search, world, sample, wrong, "other_context", f"token {token} in front")


def test_two_other_tokens_are_told_by_what_their_absence_does(world: World, sample: Drawn) -> None:
    tokens = sample.tokens.copy()
    tokens[10:12] = (tokens[10:12] + 5) % 331
    suggestion = said(other_prompt, world, sample, of_tokens(world, sample, tokens))
    assert suggestion is not None
    assert suggestion.cause == "other_context"
    stale = world.logprobs(world.decoder(sample.version - 2), sample)
    assert said(other_prompt, world, sample, stale) is None


def test_a_part_of_the_prompt_that_sees_itself_only_is_found(world: World, sample: Drawn) -> None:
    certain(
        chunk_of_the_prompt, world, sample, under(world, sample, alone(8, 16)), "kv_boundary", "8 to 15 see themselves"
    )


def test_a_window_shorter_than_the_prompt_is_found_in_its_layer_with_its_sinks(world: World, sample: Drawn) -> None:
    wrong = under(world, sample, window(17, 2), 1)
    certain(masked_in_part, world, sample, wrong, "attention_mask", "in layer 1, tokens see 17 back and the first 2")


def test_a_trainer_s_slices_are_cut_of_a_row_less_than_there_are_tokens(world: World, sample: Drawn) -> None:
    rows = len(sample.tokens) - 1
    wrong = under(world, sample, slices([round(i * rows / 4) for i in range(1, 4)]))
    certain(attention_mask, world, sample, wrong, "context_parallel", f"4 slices of {rows} tokens sees itself only")


def test_slices_that_a_rank_does_not_see_are_context_parallel(world: World, sample: Drawn) -> None:
    edges = [0, 24, 48, 72, 96]
    own = under(world, sample, of_ranks(edges))
    certain(attention_mask, world, sample, own, "context_parallel", "its own two of 4 slices")
    certain(
        attention_mask, world, sample, under(world, sample, missing(edges, 1)), "context_parallel", "the one 1 before"
    )


def test_a_quarter_of_each_head_that_is_rotated_is_found(world: World, sample: Drawn) -> None:
    own = 10_000.0 ** (-np.arange(4) / 4)

    def partly(plain: object, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, at: np.ndarray) -> np.ndarray:
        angle = at[:, None] * own
        table = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        turned = plain.rope(x[:, :, :8].copy(), *table, np.arange(len(x)))  # type: ignore[attr-defined]
        return np.concatenate([turned, x[:, :, 8:]], axis=2)

    wrong = world.logprobs(edited(world.decoder(sample.version), Edit("rope", partly)), sample)
    certain(other_model, world, sample, wrong, "model_config", "0.25 of each head")


def test_a_prompt_that_two_older_versions_cached_is_named_with_both(world: World, sample: Drawn) -> None:
    (oldest, newer), cut = (world.decoder(sample.version - back) for back in (2, 1)), 16
    cached = kv_of(world, oldest, sample.tokens)
    rest: list[Kv] = []

    def keep(plain: object, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> object:
        k[:cut], v[:cut] = (kind[:cut] for kind in cached[len(rest)])
        rest.append((k.copy(), v.copy()))
        return plain.attention(q, k, v, cu_q, cu_k)  # type: ignore[attr-defined]

    edited(newer, Edit("attention", keep)).hidden([sample.tokens])
    decoder = world.decoder(sample.version)
    stale = broken(WrongKv, decoder.reference, layers=rest, first=0, last=sample.prompt)
    wrong = world.logprobs(replace(decoder, reference=stale), sample)
    certain(stale_kv, world, sample, wrong, "stale_kv", f"weight version {sample.version - 2}", "upon them")


@pytest.mark.parametrize("part", ["prompt", "response"])
def test_keys_that_are_hidden_by_their_id_are_told_by_it(world: World, sample: Drawn, part: str) -> None:
    tokens = sample.tokens[1 : sample.prompt] if part == "prompt" else sample.tokens[sample.prompt + 16 :]
    new = tokens if part == "prompt" else np.setdiff1d(tokens, sample.tokens[: sample.prompt + 16])
    pad = max(new.tolist(), key=lambda i: (int((sample.tokens[: sample.prompt] == i).sum()), int((new == i).sum())))
    wrong = under(world, sample, without_keys(np.flatnonzero(sample.tokens == pad)))
    certain(attention_mask, world, sample, wrong, "attention_mask", f"nothing sees tokens of id {pad}")


def test_wrong_values_among_right_ones_are_wrong_by_themselves(world: World, sample: Drawn) -> None:
    truth = world.logprobs(world.decoder(sample.version), sample)
    lifted = truth.copy()
    lifted[::3] -= np.float32(0.2)
    assert evidence_of(world, sample, lifted).pointwise
    assert not evidence_of(world, sample, under(world, sample, hidden_for_a_while)).pointwise


@pytest.mark.parametrize(
    ("first", "last", "cause"), [(1, 0, "retokenisation"), (7, 0, "truncation"), (3, 4, "truncation")]
)
def test_a_start_token_that_one_side_lacks_is_told_from_a_sequence_that_was_cut(
    first: int, last: int, cause: str
) -> None:
    rollout, trainer = pair()
    count = len(trainer.logprobs) - last
    kept = {
        "tokens": rollout.tokens[first : len(rollout.tokens) - last], "token_count": len(rollout.tokens) - first - last,
        "tokens_digest": "", "prompt_len": rollout.prompt_len - first, "logprobs": trainer.logprobs[:count],
        "mask": trainer.mask[:count],
    }  # fmt: skip
    other = replace(trainer, **kept)
    failure = first_failure(rollout, other, known_contracts())
    assert failure is not None
    assert cause_of_failure(failure, rollout, other).cause == cause


@pytest.mark.parametrize("field", ["weight_version", "weight_digest"])
def test_what_a_side_did_not_report_is_no_cause_but_that(field: str) -> None:
    rollout, trainer = pair()
    silent = replace(trainer, **{field: -1 if field == "weight_version" else ""})
    failure = first_failure(rollout, silent, known_contracts())
    assert failure is not None
    said = cause_of_failure(failure, rollout, silent)
    assert (said.cause, failure.field) == ("unreported", field)
    assert f"trainer must report {field}" in said.evidence


def test_a_prompt_any_number_of_positions_away_is_found(world: World, sample: Drawn) -> None:
    suggestion = said(rope, world, sample, positions(world, sample, lambda p: np.where(p < 24, p + 37, p)))
    assert suggestion is not None
    assert (suggestion.cause, suggestion.score > 0.8) == ("position_offset", True)
    assert "response positions moved by -37" in suggestion.evidence


def test_frequencies_in_sixteen_bits_are_told_from_a_table_in_them(world: World, sample: Drawn) -> None:
    wrong = rotated(lambda w, s, p, f: (p, from_bf16(to_bf16(f.astype(np.float32))).astype(np.float64)))(world, sample)
    certain(other_model, world, sample, wrong, "rope_precision", "table of frequencies in bf16")


def test_factors_by_frequency_that_follow_no_rule_are_fitted(world: World, sample: Drawn) -> None:
    factors = np.array([1, 1, 1.02, 1.05, 1.1, 1.3, 1.25, 1.9, 2.6, 2.4, 3.1, 3.3, 4.7, 4.2, 5.5, 5.0])
    suggestion = said(rope, world, sample, rotated(lambda w, s, p, f: (p, f / factors))(world, sample))
    assert suggestion is not None
    assert (suggestion.cause, suggestion.score > 0.5) == ("rope_scaling", True)
    assert "1.02, 1.05" in suggestion.evidence


@pytest.mark.parametrize("more", [[213], [5, 5]], ids=["one", "read again"])
def test_tokens_between_two_of_the_response_are_told(world: World, sample: Drawn, more: list[int]) -> None:
    tokens = sample.tokens.copy()
    if len(more) > 1:
        more = tokens[62:64].tolist()
    values, longer = world.logprobs(world.decoder(sample.version), sample).copy(), np.insert(tokens, 64, more)
    values[40:] = of_tokens(world, replace(sample, tokens=tokens), longer)[40:]
    said_of_it = "token 213 in front of token 64" if len(more) == 1 else "its 2 tokens before again"
    certain(more_in_between, world, sample, values, "other_context", said_of_it)


def test_unknown_tokens_between_two_of_the_response_are_told_by_how_far_it_moved(world: World, sample: Drawn) -> None:
    values = world.logprobs(world.decoder(sample.version), sample).copy()
    longer = np.insert(sample.tokens, 54, (sample.tokens[:7] + 91) % 331)
    values[30:] = of_tokens(world, sample, longer)[30:]
    suggestion = said(more_in_between, world, sample, values)
    assert suggestion is not None
    assert (suggestion.cause, suggestion.score) == ("other_context", HINT)
    assert "7 tokens" in suggestion.evidence
