"""A model with another constant or another function in it: which one, and where."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from auditor.causes.computation.constants import capped, other_constants, scaled
from auditor.causes.computation.variants import other_model
from auditor.causes.edits import Edit, edited, places
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import Bits, Reference
from tests.auditor.diagnosis import Compute, certain, said


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=31)


def feed_forward_less(plain: Reference, block: Bits, stream: Bits) -> Bits:
    return plain.residual_add(to_bf16(from_bf16(block) * np.float32(0.85)), stream)


def cut_gates(plain: Reference, x: Bits) -> Bits:
    gate, up = np.split(from_bf16(x), 2, axis=1)
    return plain.swiglu(to_bf16(np.concatenate([np.minimum(gate, 2), np.clip(up, -2, 2)], axis=1)))


def squared_relu(plain: Reference, x: Bits) -> Bits:
    gate, up = np.split(from_bf16(x), 2, axis=1)
    return to_bf16((np.maximum(gate, 0) ** 2 * up).astype(np.float32))


def over_all_heads(plain: Reference, x: Bits, w: Bits, eps: float) -> Any:
    if x.ndim == 2:
        return plain.rms_norm(x, w, eps)
    wide = from_bf16(x)
    size = np.sqrt((wide * wide).mean(axis=(1, 2), keepdims=True) + np.float32(eps))
    return to_bf16((wide * (1 / size) * from_bf16(w)).astype(np.float32))


@pytest.mark.parametrize(
    ("op", "change", "compute", "words"),
    [
        ("attention", scaled((0.1 * np.log(16) + 1) ** 2 * 32**-0.5), other_constants, "scores multiplied by 1.63"),
        ("swiglu", cut_gates, other_constants, "gates cut at 2"),
        ("swiglu", squared_relu, other_model, "the square of ReLU"),
        ("rms_norm", over_all_heads, other_model, "over all heads together"),
    ],
)
def test_another_constant_or_function_is_found_to_the_bit(
    world: World, sample: Drawn, op: str, change: Callable[..., Any], compute: Compute, words: str
) -> None:
    wrong = world.logprobs(edited(world.decoder(sample.version), Edit(op, change)), sample)
    certain(compute, world, sample, wrong, "model_config", words)


def test_a_constant_of_one_place_is_found_there(world: World, sample: Drawn) -> None:
    decoder = world.decoder(sample.version)
    behind = tuple(place for place in places(decoder, "residual_add") if place[1] == 1)
    wrong = world.logprobs(edited(decoder, Edit("residual_add", feed_forward_less).at(*behind)), sample)
    certain(other_constants, world, sample, wrong, "model_config", "blocks multiplied by 0.85, at place 1")


def test_a_number_that_is_only_near_is_said_with_what_it_leaves(world: World, sample: Drawn) -> None:
    wrong = world.logprobs(edited(world.decoder(sample.version), Edit("attention", capped(6.0))), sample)
    suggestion = said(other_constants, world, sample, wrong)
    assert suggestion is not None
    assert suggestion.cause == "model_config"
    assert "softly capped at 6" in suggestion.evidence


@pytest.mark.parametrize(
    ("part", "times", "more", "words"),
    [
        ("layernorm", 1.0, -1.0, "one taken from the weights of norms of hidden states"),
        ("post_attention", 0.0, 1.0, "norms behind attention without weights"),
    ],
)
def test_norms_that_are_read_in_another_way_are_found(
    world: World, sample: Drawn, part: str, times: float, more: float, words: str
) -> None:
    weights = world.decoder(sample.version).weights
    parts = (part, "model.norm") if part == "layernorm" else (part,)
    read = {
        n: to_bf16(from_bf16(w) * np.float32(times) + np.float32(more)) if any(p in n for p in parts) else w
        for n, w in weights.items()
    }
    wrong = world.logprobs(world.with_weights(read), sample)
    certain(other_model, world, sample, wrong, "model_config", words)
