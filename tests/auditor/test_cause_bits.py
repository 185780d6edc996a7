"""Weights and the inputs of products in fewer bits: which format, under which scales, where."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from auditor.causes.computation.activations import products_in_fewer_bits
from auditor.causes.edits import DOWN, GATE, UP, Edit, edited
from auditor.causes.oracle import F32
from auditor.causes.weights.grids import E4M3, FP4, INT4_ZERO, ROW, coarse, group
from auditor.causes.weights.rounded import rounded_weights
from auditor.faults.blind_third_ops import EagerAttention, Native
from auditor.faults.ops import broken
from auditor.faults.reported import to_e4m3
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import Bits, Reference
from tests.auditor.diagnosis import certain, said

Change = Callable[[F32], Any]


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=29)


def microscaled(x: F32) -> Any:
    """FP4, 32 neighbours of a row under a power of two, written down without the module that is tested."""
    groups = x.reshape(len(x), -1, 32)
    scale = np.exp2(np.floor(np.log2(np.abs(groups).max(axis=2, keepdims=True))) - 2)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    nearest = np.abs(np.abs(np.clip(groups / scale, -6, 6))[..., None] - levels).argmin(axis=3)
    return (np.sign(groups) * levels[nearest] * scale).reshape(x.shape).astype(np.float32)


def with_zeros(x: F32) -> Any:
    """4-bit integers with a whole zero point, groups of 32."""
    groups = x.reshape(len(x), -1, 32)
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    scale = (high - low) / np.float32(15)
    zero = np.rint(-low / scale)
    return ((np.clip(np.rint(groups / scale) + zero, 0, 15) - zero) * scale).reshape(x.shape).astype(np.float32)


@pytest.mark.parametrize(
    ("to", "part", "words"),
    [
        (microscaled, ".mlp.", ("mlp tensors in FP4 (E2M1)", "32 values of a row, microscaled")),
        (with_zeros, "layers.1.self_attn", ("4-bit integers with a whole zero point", "self_attn tensors of layer 1")),
    ],
)
def test_the_format_of_some_weights_is_found_to_the_bit(
    world: World, sample: Drawn, to: Change, part: str, words: tuple[str, ...]
) -> None:
    weights = world.decoder(sample.version).weights
    few = {n: to_bf16(to(from_bf16(w))) if part in n and w.ndim == 2 else w for n, w in weights.items()}
    wrong = world.logprobs(world.with_weights(few), sample)
    certain(rounded_weights, world, sample, wrong, "weight_precision", *words)


def test_weights_under_an_earlier_versions_scales_are_found(world: World, sample: Drawn) -> None:
    def clipped(name: str, weight: Bits) -> Bits:
        scale = np.abs(from_bf16(world.decoder(1).weights[name])).max(axis=1, keepdims=True) / np.float32(448)
        return to_bf16((to_e4m3(from_bf16(weight) / scale) * scale).astype(np.float32))

    weights = world.decoder(sample.version).weights
    wrong = world.logprobs(
        world.with_weights({n: clipped(n, w) if w.ndim == 2 else w for n, w in weights.items()}), sample
    )
    certain(rounded_weights, world, sample, wrong, "weight_precision", "a scale for a row that version 1 had")


def given(change: Change, first: int = 0) -> Edit:
    def gemm(plain: Reference, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        return plain.gemm(to_bf16(change(from_bf16(x))), w, segments=segments)

    return replace(Edit("gemm", gemm), first=first)


def fixed(x: F32) -> Any:
    scale = np.float32(4 / 127)
    return (np.clip(np.rint(x / scale), -127, 127) * scale).astype(np.float32)


def by_token(x: F32) -> Any:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(448)
    return (to_e4m3(x / scale) * scale).astype(np.float32)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (given(fixed), "products with inputs in 8-bit integers of values up to 4"),
        (
            given(by_token).at((1, GATE), (1, UP), (1, DOWN)),
            "feed-forward parts with inputs in FP8 (E4M3)",
        ),
        (given(by_token, first=24), "a scale for a row, from token 24 on"),
    ],
)
def test_inputs_in_fewer_bits_are_found_with_their_products(
    world: World, sample: Drawn, edit: Edit, words: str
) -> None:
    wrong = world.logprobs(edited(world.decoder(sample.version), edit), sample)
    certain(products_in_fewer_bits, world, sample, wrong, "activation_precision", words)


@pytest.mark.parametrize("ops", [Native, EagerAttention])
def test_ops_that_round_otherwise_are_no_fewer_bits(world: World, sample: Drawn, ops: type) -> None:
    decoder = world.decoder(sample.version)
    wrong = world.logprobs(replace(decoder, reference=broken(ops, decoder.reference)), sample)
    assert said(products_in_fewer_bits, world, sample, wrong) is None


def test_a_scale_is_that_of_its_group_and_what_is_padded_is_cut_off() -> None:
    x = to_bf16(np.random.default_rng(0).standard_normal((5, 70)).astype(np.float32))
    assert coarse(E4M3, group(32))(x).shape == x.shape
    assert (coarse(E4M3, group(32))(x)[:, :32] == coarse(E4M3, ROW)(x[:, :32])).all()
    assert (coarse(INT4_ZERO, group(64))(x)[:, :64] == coarse(INT4_ZERO, ROW)(x[:, :64])).all()
    assert len(np.unique(from_bf16(coarse(FP4, ROW)(x[:1])))) <= 15
