"""Gradients of attention and the head, again and again: `SOAK_INPUTS=2000 pytest -m soak tests/gpu/test_soak.py`.

Random inputs, each computed the plain way once and six times by the Hopper kernels, for a race shows only sometimes.
It is worth most with other processes on the device: start several with different SOAK_SEED. The few inputs without a
comparison are for `compute-sanitizer --tool memcheck python -m pytest -m soak tests/gpu/test_soak.py -k sanitizer`.
"""

import os
import random

import pytest
import torch

from rl_kernel.ops.attention.triton_backward import attention_backward, launch_for
from rl_kernel.ops.attention.triton_kernel import attention
from tests.gpu.tensors import normal, offsets, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.soak]

INPUTS, SEED = int(os.environ.get("SOAK_INPUTS", "200")), int(os.environ.get("SOAK_SEED", "0"))
CALLS = 6
HEADS, KV_HEADS = 8, 2


def drawn(rng: random.Random, lengths: list[int], dim: int) -> list[torch.Tensor]:
    """dout, q, k, v of so many tokens, of one of three sizes."""
    scale, seed = rng.choice((0.1, 1.0, 3.0)), rng.randrange(1 << 20)
    counts = (HEADS, HEADS, KV_HEADS, KV_HEADS)
    return [normal(sum(lengths), count, dim, seed=seed + i, scale=scale) for i, count in enumerate(counts)]


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_of_random_lengths_have_the_bits_of_the_plain_kernels(dim: int, sequences: int) -> None:
    rng = random.Random(SEED)
    for _ in range(INPUTS):
        lengths = [
            rng.choice((rng.randint(1, 200), rng.randint(1, 900), 64 * rng.randint(1, 20), rng.randint(900, 2600)))
            for _ in range(sequences)
        ]
        (dout, *qkv), cu = drawn(rng, lengths, dim), offsets(*lengths)
        forward = attention(*qkv, cu, cu)
        expected = attention_backward(dout, *qkv, *forward, cu, launch=launch_for(dim))
        for _ in range(CALLS):
            found = attention_backward(dout, *qkv, *forward, cu)
            for one, other, name in zip(found, expected, ("dq", "dk", "dv"), strict=True):
                same_bits(one, other, f"{name} of {lengths}")


def test_a_head_merged_inside_of_the_product_has_the_bits_of_one_merged_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rl_kernel.ops.linear_logp import triton_kernel as op

    rng = random.Random(SEED)
    for seed in range(INPUTS):
        tokens = rng.choice((rng.randint(16, 192), rng.randint(193, 330), rng.randint(16, 700)))
        rows, width = rng.randint(300, 60000) // 8 * 8, rng.choice((512, 1024))
        h, w = normal(tokens, width, seed=seed), normal(rows, width, seed=seed + 1, scale=0.05)
        target = torch.arange(tokens, device="cuda") * 7919 % rows
        how = {"temperature": rng.choice((1.0, 0.7)), "vocab": rng.randint(rows // 2, rows)}
        with monkeypatch.context() as patch:
            patch.setattr(op.gluon_kernel, "serves", lambda *_: False)
            expected = op.linear_logp(h, w, target, **how)
        for _ in range(CALLS):
            for one, other, name in zip(op.linear_logp(h, w, target, **how), expected, ("logp", "lse"), strict=True):
                same_bits(one, other, f"{name} of {tokens} tokens, {rows} x {width}, {how}")


@pytest.mark.parametrize("lengths", [(1,), (65,), (130, 7, 200), (128,)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_what_a_sanitizer_looks_at(dim: int, lengths: tuple[int, ...]) -> None:
    dout, *qkv = drawn(random.Random(SEED), list(lengths), dim)
    cu = offsets(*lengths)
    found = attention_backward(dout, *qkv, *attention(*qkv, cu, cu), cu)
    torch.cuda.synchronize()
    assert all(bool(x.isfinite().all()) for x in found)
