"""Weights that are off in parts: which parts, of what, is told from the values; and rounding is told from weights."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from auditor.causes.evidence import CERTAIN, Evidence
from auditor.causes.oracle import Oracle
from auditor.causes.patterns import flat_last_bits, other_weights
from auditor.causes.weights.altered import altered_weights
from auditor.causes.weights.mixture import Measured, measured_of
from auditor.causes.weights.rounded import rounded_weights
from auditor.causes.weights.versions import mixed_weights
from auditor.compare import Logprobs
from auditor.faults.blind_third_ops import EagerAttention, Native, NormInFp32
from auditor.faults.ops import broken
from auditor.faults.reported import to_e4m3
from auditor.faults.world import Drawn, World, from_bf16, moved, to_bf16
from rl_kernel.reference.ops import Bits
from tests.auditor.diagnosis import Compute, evidence_of, oracle_of, said

Change = Callable[[str, Bits], Bits]


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=17)


def under(world: World, sample: Drawn, change: Change) -> Logprobs:
    weights = world.decoder(sample.version).weights
    return world.logprobs(world.with_weights({n: change(n, w) for n, w in weights.items()}), sample)


def measured(world: World, sample: Drawn, wrong: Logprobs) -> tuple[Measured, Evidence, Oracle]:
    evidence, oracle = evidence_of(world, sample, wrong), oracle_of(world, sample)
    found = measured_of(evidence, oracle)
    assert found is not None
    return found, evidence, oracle


def in_blocks(weight: Bits) -> Bits:
    wide = from_bf16(weight).copy()
    for row in range(0, wide.shape[0], 128):
        for column in range(0, wide.shape[1], 128):
            block = wide[row : row + 128, column : column + 128]
            scale = np.abs(block).max() / np.float32(448)
            block[:] = to_e4m3(block / scale) * scale
    return to_bf16(wide)


def test_the_first_order_says_what_another_version_makes_and_what_its_parts_add_up_to(
    world: World, sample: Drawn
) -> None:
    older = world.decoder(sample.version - 1)
    found, _, oracle = measured(world, sample, world.logprobs(older, sample))
    assert found.response is not None
    (effects,) = found.response.effects([older.weights], parts=True)
    whole = sum(effect.whole for effect in effects.values())
    assert np.corrcoef(whole, found.delta)[0, 1] > 0.9
    left = found.delta - whole
    assert float(np.sqrt((left * left).mean())) < 1.5  # what rounding may do, and little more
    cut = effects["model.layers.0.mlp.down_proj.weight"]
    for axis, count in enumerate((160, 224)):
        assert cut.parts(axis).shape == (len(found.delta), count + 1)
        halves = cut.part(axis, 0, 70) + cut.part(axis, 70, count)
        np.testing.assert_array_almost_equal_nulp(halves, cut.parts(axis)[:, -1], nulp=1 << 24)
    assert set(effects) == set(oracle.decoder.weights)


@pytest.mark.parametrize("ops", [Native, NormInFp32, EagerAttention])
def test_ops_that_round_otherwise_are_no_weights(world: World, sample: Drawn, ops: type) -> None:
    decoder = world.decoder(sample.version)
    native = world.logprobs(replace(decoder, reference=broken(ops, decoder.reference)), sample)
    found, evidence, oracle = measured(world, sample, native)
    assert 0.5 < found.size < 1.3
    assert [suggestion.cause for suggestion in flat_last_bits(evidence, oracle.noise)] == ["reduction_order"]
    assert list(mixed_weights(evidence, oracle)) == []


def test_weights_that_are_off_are_no_rounding(world: World, sample: Drawn) -> None:
    noisy = under(world, sample, lambda n, w: moved(w, 2.0**-7, np.random.default_rng(len(n))))
    found, evidence, oracle = measured(world, sample, noisy)
    assert found.size > 1.5
    assert list(flat_last_bits(evidence, oracle.noise)) == []
    assert [suggestion.cause for suggestion in other_weights(evidence, oracle.noise)] == ["other_weights"]


def mixed_ages(world: World, sample: Drawn) -> Change:
    names = [n for n in world.decoder(1).weights if "layers.0.mlp" in n or "layers.1.self_attn.k" in n]
    return lambda n, w: world.decoder(sample.version - (1 if "mlp" in n else 3)).weights[n] if n in names else w


def last_bucket(world: World, sample: Drawn) -> Change:
    names = list(world.decoder(1).weights)
    return lambda n, w: world.decoder(sample.version - 1).weights[n] if n in names[-9:] else w


def one_rank(world: World, sample: Drawn) -> Change:
    def change(name: str, weight: Bits) -> Bits:
        if "self_attn" not in name or weight.ndim == 1:
            return weight
        axis = int("o_proj" in name)
        mine = (slice(None),) * axis + (slice(0, weight.shape[axis] // 4),)
        mixed = weight.copy()
        mixed[mine] = world.decoder(sample.version - 1).weights[name][mine]
        return mixed

    return change


def left_in(world: World, sample: Drawn) -> Change:
    def change(name: str, weight: Bits) -> Bits:
        if "_proj." not in name:
            return weight
        first, before = (from_bf16(world.decoder(v).weights[name]) for v in (1, sample.version - 1))
        return to_bf16(from_bf16(weight) + (before - first))

    return change


def taken_off(world: World, sample: Drawn) -> Change:
    def change(name: str, weight: Bits) -> Bits:
        if "_proj." not in name:
            return weight
        own = from_bf16(weight)
        adapter = own - from_bf16(world.decoder(1).weights[name])
        return to_bf16(from_bf16(to_bf16(own + adapter)) - adapter)

    return change


def averaged(world: World, sample: Drawn) -> Change:
    older = world.decoder(sample.version - 2).weights
    keep, take = np.float32(0.9), np.float32(0.1)
    return lambda n, w: to_bf16(keep * from_bf16(w) + take * from_bf16(older[n]))


def fp8_in_part(world: World, sample: Drawn) -> Change:
    return lambda n, w: in_blocks(w) if ".mlp.up" in n or "layers.1.self_attn.q_proj" in n else w


def keys_for_values(world: World, sample: Drawn) -> Change:
    weights = world.decoder(sample.version).weights
    swapped = {"k_proj": "v_proj", "v_proj": "k_proj"}
    prefix = "model.layers.1.self_attn."
    return lambda n, w: next(
        (weights[n.replace(a, b)] for a, b in swapped.items() if n.startswith(prefix) and a in n), w
    )


def one_rank_twice(world: World, sample: Drawn) -> Change:
    """Both ranks load what is the first one's of keys and values."""
    return lambda n, w: np.concatenate([w[:32], w[:32]]) if "k_proj" in n or "v_proj" in n else w


def one_head_too_far(world: World, sample: Drawn) -> Change:
    return lambda n, w: np.roll(w, 32, axis=0) if "layers.1.self_attn.q_proj" in n else w


def half_lost(world: World, sample: Drawn) -> Change:
    return lambda n, w: np.concatenate([w[:112], 0 * w[112:]]) if "layers.0.mlp.gate_proj" in n else w


@pytest.mark.parametrize(
    ("fault", "compute", "cause", "words"),
    [
        (last_bucket, mixed_weights, "stale_weights", ("the tensors from",)),
        (mixed_ages, mixed_weights, "stale_weights", ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_norm")),
        (one_rank, mixed_weights, "stale_weights", ("rank 0 of 4 in self_attn tensors",)),
        (left_in, mixed_weights, "adapter_scale", ("added once more",)),
        (averaged, rounded_weights, "adapter_scale", ("an average of 0.9 times the stated version",)),
        (taken_off, rounded_weights, "weight_precision", ("1 times what came since version 1 was merged and taken",)),
        (fp8_in_part, rounded_weights, "weight_precision", ("FP8 (E4M3)", "block of 128", "layers.1.self_attn.q_proj")),
        (keys_for_values, altered_weights, "other_weights", ("layer 1 with", "self_attn.k_proj and self_attn.v_proj")),
        (one_rank_twice, altered_weights, "other_weights", ("k_proj and v_proj", "the first of 2 ranks in both")),
        (one_head_too_far, altered_weights, "other_weights", ("layers.1.self_attn.q_proj", "heads one head too far")),
        (half_lost, altered_weights, "other_weights", ("no values in", "layers.0.mlp.")),
    ],
)  # fmt: skip
def test_weights_that_are_others_in_a_part_are_found_to_the_bit(
    world: World,
    sample: Drawn,
    fault: Callable[[World, Drawn], Change],
    compute: Compute,
    cause: str,
    words: tuple[str, ...],
) -> None:
    suggestion = said(compute, world, sample, under(world, sample, fault(world, sample)))
    assert suggestion is not None
    assert (suggestion.cause, suggestion.score) == (cause, CERTAIN), suggestion
    assert [word for word in words if word not in suggestion.evidence] == []


def test_where_no_bits_agree_the_difference_still_points_where_weights_move_it(world: World, sample: Drawn) -> None:
    """Rows of a matrix up to some number that no rank's part ends at."""
    older = world.decoder(sample.version - 1).weights

    def cut(name: str, weight: Bits) -> Bits:
        return np.concatenate([weight[:90], older[name][90:]]) if weight.ndim == 2 and "mlp." in name else weight

    suggestion = said(mixed_weights, world, sample, under(world, sample, cut))
    assert suggestion is not None
    assert suggestion.cause == "stale_weights"
    assert 0.45 < suggestion.score < 0.9
    assert "of its square" in suggestion.evidence or "0 of 72" in suggestion.evidence


def test_a_model_too_large_to_be_run_back_has_the_likeliest_parts_tried_all_the_same(
    world: World, sample: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.causes.weights.response._DEAREST", 0.0)
    older = world.decoder(sample.version - 1).weights
    wrong = under(world, sample, lambda n, w: older[n] if "norm" in n else w)
    suggestion = said(mixed_weights, world, sample, wrong)
    assert suggestion is not None
    assert (suggestion.cause, suggestion.score) == ("stale_weights", CERTAIN)
    assert "norm tensors" in suggestion.evidence


def test_what_is_dear_to_run_back_is_run_back_for_fewer_rows(
    world: World, sample: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.causes.weights.response._DEAREST", 8e9)
    older = world.decoder(sample.version - 1).weights
    found, evidence, oracle = measured(world, sample, under(world, sample, lambda n, w: older[n] if "mlp" in n else w))
    assert found.response is not None
    assert len(found.delta) == 36
    assert max(said.score for said in mixed_weights(evidence, oracle)) == CERTAIN


def test_a_version_that_was_published_twice_is_no_part_of_anything(world: World, sample: Drawn) -> None:
    own = world.decoder(sample.version)
    versions = {sample.version - 1: own, sample.version + 1: own, 1: world.decoder(1)}
    oracle = oracle_of(world, sample)
    oracle.versions, oracle.version = tuple(versions), versions.__getitem__  # type: ignore[method-assign]
    wrong = under(world, sample, lambda n, w: world.decoder(1).weights[n] if "norm" in n else w)
    evidence = evidence_of(world, sample, wrong)
    assert max(said.score for said in mixed_weights(evidence, oracle)) == CERTAIN
    assert [said.score for said in rounded_weights(evidence, oracle) if said.score == CERTAIN] == []
