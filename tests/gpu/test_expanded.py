"""Rows of an expanded tensor lie over one another, no matrix of the bulk copy engine's: the plain kernels read them."""

import pytest
import torch

from tests.gpu.tensors import normal, same_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "segments"), [(4, 1), (64, 1), (64, 8), (2048, 8)])
def test_a_product_has_the_bits_of_a_copy(rows: int, segments: int) -> None:
    """Few rows, cuBLASLt, clusters, tiles of a tree."""
    from rl_kernel.ops.gemm.cublaslt import gemm

    x, w = normal(1, 4096, seed=1).expand(rows, -1), normal(24576 if rows == 4 else 4096, 4096, seed=2)
    assert x.stride() == (0, 1)
    same_bits(gemm(x, w, segments=segments), gemm(x.contiguous(), w, segments=segments), "y")


def test_the_head_has_the_bits_of_a_copy() -> None:
    from rl_kernel.ops.linear_logp.triton_kernel import linear_logp

    h, w = normal(1, 1024, seed=1).expand(64, -1), normal(5000, 1024, seed=2)
    target = torch.arange(64, device="cuda")
    found = linear_logp(h, w, target, temperature=1.0, vocab=4900)
    expected = linear_logp(h.contiguous(), w, target, temperature=1.0, vocab=4900)
    for one, other, name in zip(found, expected, ("logp", "lse"), strict=True):
        same_bits(one, other, name)
