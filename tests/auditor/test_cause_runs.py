"""Runs of rows and columns of other weights: what a rank held, what a bucket carried, what all others did."""

from collections.abc import Callable

import numpy as np
import pytest

from auditor.causes.evidence import CERTAIN, Suggestion
from auditor.causes.weights.parts import Layout, span
from auditor.causes.weights.rounded import rounded_weights
from auditor.causes.weights.runs import runs
from auditor.causes.weights.versions import mixed_weights
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import Bits
from tests.auditor.diagnosis import certain, said

Old = Callable[[str, Bits, Bits], Bits]


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=23)


def rows_of_ranks(ranks: int, first: int, last: int) -> Old:
    """Every tensor is cut along its rows, as by FSDP, norms and down projections, too."""

    def old(name: str, now: Bits, before: Bits) -> Bits:
        size = -(-len(now) // ranks)
        mixed = now.copy()
        mixed[first * size : last * size] = before[first * size : last * size]
        return mixed

    return old


def columns_of_a_rank(name: str, now: Bits, before: Bits) -> Bits:
    if "mlp." not in name:
        return now
    mixed, size = now.copy(), -(-now.shape[1] // 5)
    mixed[:, 3 * size : 4 * size] = before[:, 3 * size : 4 * size]
    return mixed


def all_but_one_rank(name: str, now: Bits, before: Bits) -> Bits:
    return rows_of_ranks(6, 4, 5)(name, before, now)


def a_bucket(name: str, now: Bits, before: Bits) -> Bits:
    """From somewhere in one matrix to somewhere in another."""
    if "layers.0.mlp.up_proj" in name:
        return np.concatenate([now[:75], before[75:]])
    if "layers.0.mlp.down_proj" in name:
        return before
    return np.concatenate([before[:51], now[51:]]) if "layers.1.self_attn.q_proj" in name else now


def of_old(world: World, sample: Drawn, old: Old) -> Suggestion | None:
    weights, older = (world.decoder(sample.version - back).weights for back in (0, 1))
    mixed = world.with_weights({n: old(n, w, older[n]) for n, w in weights.items()})
    return said(mixed_weights, world, sample, world.logprobs(mixed, sample))


def third_of_the_vocabulary(name: str, now: Bits, before: Bits) -> Bits:
    """Of four ranks that share the 384 rows of a padded vocabulary."""
    return now if len(now) != 331 else np.concatenate([now[:192], before[192:288], now[288:]])


@pytest.mark.parametrize(
    ("old", "words"),
    [
        (rows_of_ranks(3, 1, 2), "the part of rank 1 of 3, by rows"),
        (columns_of_a_rank, "the part of rank 3 of 5, by columns in mlp tensors"),
        (all_but_one_rank, "all but the part of rank 4 of 6, by rows"),
        (third_of_the_vocabulary, "rank 2 of 4, of the padded vocabulary in vocabulary tensors"),
    ],
)
def test_the_run_of_rows_or_columns_that_is_old_is_found_to_the_bit(
    world: World, sample: Drawn, old: Old, words: str
) -> None:
    suggestion = of_old(world, sample, old)
    assert suggestion is not None
    assert (suggestion.cause, suggestion.score) == ("stale_weights", CERTAIN), suggestion
    assert words in suggestion.evidence


def test_a_bucket_that_begins_and_ends_inside_of_matrices_is_seen_to_be_old(world: World, sample: Drawn) -> None:
    suggestion = of_old(world, sample, a_bucket)
    assert suggestion is not None
    assert suggestion.cause == "stale_weights"
    assert suggestion.score > 0.5
    assert "of model.layers.0.mlp.up_proj.weight to" in suggestion.evidence


def test_every_other_value_that_is_old_is_not_taken_for_half_of_a_change(world: World, sample: Drawn) -> None:
    suggestion = of_old(world, sample, lambda name, now, before: np.where(now & 1, before, now))
    assert suggestion is not None
    assert suggestion.cause == "stale_weights"
    assert "some values of" in suggestion.evidence


def test_an_average_of_versions_is_a_mixture_and_no_part_of_an_update(world: World, sample: Drawn) -> None:
    now, last, before = (
        {n: from_bf16(w) for n, w in world.decoder(sample.version - back).weights.items()} for back in (0, 1, 2)
    )
    half, third, rest = np.float32(0.5), np.float32(0.3), np.float32(0.2)
    mixed = {n: to_bf16(half * now[n] + third * last[n] + rest * before[n]) for n in now}
    suggestion = said(mixed_weights, world, sample, world.logprobs(world.with_weights(mixed), sample))
    assert suggestion is not None
    assert suggestion.cause == "adapter_scale"
    assert "a mixture of all tensors" in suggestion.evidence


def test_one_tensor_in_another_strength_is_found_to_the_bit_though_it_is_less_than_rounding(
    world: World, sample: Drawn
) -> None:
    weights, first = world.decoder(sample.version).weights, world.decoder(1).weights
    name = "model.layers.1.self_attn.v_proj.weight"
    base, own = from_bf16(first[name]), from_bf16(weights[name])
    twice = world.with_weights({**weights, name: to_bf16(base + 2 * (own - base))})
    wrong = world.logprobs(twice, sample)
    certain(mixed_weights, world, sample, wrong, "adapter_scale", f"2 times what came since in {name}")


def test_new_directions_of_the_old_lengths_are_found_to_the_bit(world: World, sample: Drawn) -> None:
    weights, first = world.decoder(sample.version).weights, world.decoder(1).weights

    def of_old_length(name: str, weight: Bits) -> Bits:
        new, base = from_bf16(weight), from_bf16(first[name])
        length = np.linalg.norm(base, axis=1, keepdims=True) / np.linalg.norm(new, axis=1, keepdims=True)
        return to_bf16((new * length).astype(np.float32))

    turned = world.with_weights({n: of_old_length(n, w) if "_proj." in n else w for n, w in weights.items()})
    wrong = world.logprobs(turned, sample)
    certain(rounded_weights, world, sample, wrong, "adapter_scale", "each of their rows of the length that version 1")


def test_ranks_share_whole_tiles_of_the_vocabulary_and_are_tried_where_no_effect_is_known(world: World) -> None:
    weights = world.decoder(1).weights
    layout = Layout(weights, list(weights))
    tried = list(runs(layout, {}, np.zeros(16)))
    for ranks in (2, 4, 8):
        held = [c for c in tried if c.said in {f"the part of rank {r} of {ranks} in all tensors" for r in range(ranks)}]
        assert len(held) == ranks
        parts = [part for choice in held for part in choice.parts if part.name == "lm_head.weight"]
        assert all(part.first % 64 == 0 for part in parts)
        assert parts[-1].last == 331
    assert span("lm_head.weight", 331, 0, 2) == (0, 192)
