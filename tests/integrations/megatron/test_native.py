"""The control group runs, learns the same things, and has other bits."""

import numpy as np
import torch

from rl_kernel.contracts import model_contract
from rl_kernel.integrations.megatron.native import NativeModel
from rl_kernel.integrations.megatron.packing import pack
from rl_kernel.integrations.megatron.weights import pieces
from rl_kernel.ops import strict_plan
from tests.integrations.megatron.cases import TEMPERATURE, build, forward_backward, samples


def native_forward_backward(folder, tp):
    model = NativeModel(folder, tp)
    model.load(folder)
    model.clear_gradients()
    new = model.logprobs(pack(samples(331), vocab=331, max_position=2048), TEMPERATURE)
    model.backward(new, torch.cos(new.detach()))
    model.finish_gradients()
    gradients = {name: p.main_grad for name, p in model.parameters.items()}
    return new.detach().numpy(), {p.name: p.whole(tp).numpy() for p in pieces(model.layout, gradients)}


def test_native_logprobs_are_near_the_strict_ones_but_not_their_bits(folders, tp):
    found, _ = native_forward_backward(folders["qwen3"], tp)
    strict, _ = forward_backward(build(folders["qwen3"], strict_plan(model_contract(), "cpu"), tp), samples(331))
    assert (found.view(np.uint32) != strict.view(np.uint32)).any()
    # Two bf16 models of one function: far apart would mean another function, or rows that belong to other tokens.
    assert np.abs(found - strict).max() < np.std(strict) / 4


def test_native_gradients_point_where_the_strict_ones_do(folders, tp):
    for name in ("llama-tied", "qwen3"):
        _, found = native_forward_backward(folders[name], tp)
        model = build(folders[name], strict_plan(model_contract(segments=2), "cpu"), tp)
        _, strict = forward_backward(model, samples(331))
        assert found.keys() == strict.keys()
        for tensor, gradient in strict.items():
            a, b = gradient.ravel().astype(np.float64), found[tensor].ravel().astype(np.float64)
            # Rounding turns a gradient by a fraction of a degree; a transposed or misplaced one is at right angles.
            assert a @ b > 0.99 * np.linalg.norm(a) * np.linalg.norm(b), tensor
