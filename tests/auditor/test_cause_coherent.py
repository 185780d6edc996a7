"""One factor for all tokens tells another op from other weights, other tokens and roundings."""

from dataclasses import replace

import numpy as np
import pytest

from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import STRONG
from auditor.causes.weights.coherent import one_factor
from auditor.faults.blind_third_ops import Native
from auditor.faults.ops import broken
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import Bits, Reference
from tests.auditor.diagnosis import certain, said


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=37)


def test_a_matrix_that_lost_its_scale_is_found_to_the_bit(world: World, sample: Drawn) -> None:
    weights = world.decoder(sample.version).weights
    name = "model.layers.1.mlp.down_proj.weight"
    half = world.with_weights({**weights, name: to_bf16(from_bf16(weights[name]) * np.float32(0.5))})
    certain(one_factor, world, sample, world.logprobs(half, sample), "other_weights", "layers.1.mlp", "times 0.5")


def test_an_activation_that_nobody_knows_is_another_model(world: World, sample: Drawn) -> None:
    def swiglu(plain: Reference, x: Bits) -> Bits:
        gate, up = np.split(from_bf16(x), 2, axis=1)
        return to_bf16((np.log1p(np.exp(gate)) * np.tanh(gate) * up).astype(np.float32))

    wrong = world.logprobs(edited(world.decoder(sample.version), Edit("swiglu", swiglu)), sample)
    suggestion = said(one_factor, world, sample, wrong)
    assert suggestion is not None
    assert suggestion.cause == "model_config"
    assert 0.4 < suggestion.score < STRONG


def test_old_weights_other_angles_and_native_ops_are_no_factor(world: World, sample: Drawn) -> None:
    decoder = world.decoder(sample.version)
    slower = edited(decoder, Edit("rope", lambda plain, x, cos, sin, at: plain.rope(x, cos, sin, at // 2)))
    native = replace(decoder, reference=broken(Native, decoder.reference))
    for wrong in (world.decoder(sample.version - 1), slower, native):
        assert said(one_factor, world, sample, world.logprobs(wrong, sample)) is None
