"""Launches that start while the kernel before still runs have the bits of launches that wait for the device."""

from collections.abc import Callable

import pytest
import torch

from tests.gpu.tensors import normal, same_bits

pytestmark = pytest.mark.gpu

HIDDEN, FFN, HEADS, KV_HEADS, DIM = 4096, 12288, 32, 8, 128
Step = Callable[[torch.Tensor], torch.Tensor]


def _layer(tokens: int) -> list[Step]:
    """x[tokens, HIDDEN] → the same shape, each step reading what the one before wrote."""
    from rl_kernel.ops.gemm.cublaslt import gemm
    from rl_kernel.ops.rms_norm.triton_kernel import add_rms_norm, rms_norm
    from rl_kernel.ops.rope.triton_kernel import rope, rope_pair
    from rl_kernel.ops.swiglu.triton_kernel import swiglu

    gain, head_gain = normal(HIDDEN, seed=1), normal(DIM, seed=2)
    gate_up, down = normal(2 * FFN, HIDDEN, seed=3, scale=0.02), normal(HIDDEN, FFN, seed=4, scale=0.02)
    across = normal(HIDDEN, HIDDEN, seed=7, scale=0.016)
    angles = normal(tokens, DIM // 2, seed=5, dtype=torch.float32)
    cos, sin, positions = angles.cos(), angles.sin(), torch.arange(tokens, device="cuda")

    def turned(x: torch.Tensor) -> torch.Tensor:
        q = x.view(tokens, HEADS, DIM)
        q, k = rope_pair(q, q[:, :KV_HEADS], cos, sin, positions)
        return torch.cat((q[:, KV_HEADS:], k), 1).view(tokens, HIDDEN)

    return [
        lambda x: rms_norm(x, gain, 1e-6),
        lambda x: rms_norm(x.view(tokens, HEADS, DIM), head_gain, 1e-6),
        lambda x: rope(x, cos, sin, positions),
        turned,
        lambda x: gemm(x, gate_up),
        swiglu,
        lambda x: gemm(x, down),
        lambda x: gemm(x, across, segments=8),
        lambda x: add_rms_norm(x, x, gain, 1e-6)[1],
    ]


@pytest.mark.parametrize("tokens", [1, 9, 200, 500, 2048])
def test_a_launch_that_starts_early_sees_what_the_one_before_wrote(tokens: int) -> None:
    steps = _layer(tokens)
    start = normal(tokens, HIDDEN, seed=6)

    def run(between: Callable[[], None]) -> torch.Tensor:
        x = start
        for _ in range(6):
            for step in steps:
                x = step(x)
                between()
        return x

    expected = run(torch.cuda.synchronize)
    same_bits(run(lambda: None), expected, "one launch after another")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(lambda: None)
    for _ in range(5):
        found.fill_(float("nan"))
        graph.replay()
        same_bits(found, expected, "in a graph")
