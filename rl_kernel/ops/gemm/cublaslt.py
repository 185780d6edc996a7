"""GEMM on NVIDIA GPUs: cuBLASLt where it has the contract's bits, kernels of our own everywhere else.

With split-K refused, cuBLASLt adds the k-groups of the sm90 MMA model in one ascending chain, so its bits are the
contract's; it has no tree over segments and no chain that continues from a main gradient, and at few rows it is slow.
Which one runs is a function of shape and layout alone, and all have the same bits. One limit: where a result is NaN,
cuBLASLt stores 0x7fff, not 0x7fc0; every op that follows stores the one NaN again.
"""

import torch

from rl_kernel.ops import cluster_matmul, cublas_matmul, gluon_few, gluon_matmul
from rl_kernel.ops.accelerator import BF16, PackedWeight, pack
from rl_kernel.ops.gemm.triton_kernel import checked, gemm_dw_
from rl_kernel.ops.triton_matmul import product

__all__ = ["PackedWeight", "gemm", "gemm_dw_", "gemm_dx", "pack"]


def _multiply(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, segments: int) -> torch.Tensor:
    if segments == 1 and cublas_matmul.serves(y, a, b):
        return cublas_matmul.chain_product(y, a, b)
    if gluon_few.serves(y, a, b, segments):
        return gluon_few.few_product(y, a, b, segments)
    if segments > 1 and cluster_matmul.serves(y, a, b, segments):
        return cluster_matmul.cluster_product(y, a, b, segments)
    if segments > 1 and gluon_matmul.serves(y, a, b, segments):
        return gluon_matmul.tree_product(y, a, b, segments)
    return product(y, a, b, segments=segments)


def gemm(
    x: torch.Tensor, w: torch.Tensor | PackedWeight, *, segments: int = 1, out_dtype: torch.dtype = BF16
) -> torch.Tensor:
    """x[M,K], w[N,K] bf16 → y[M,N] in out_dtype (bf16 or fp32)."""
    weight, y = checked("gemm", x, w, 1, out_dtype)
    return _multiply(y, x, weight.t(), segments)


def gemm_dx(
    dy: torch.Tensor, w: torch.Tensor | PackedWeight, *, segments: int = 1, out_dtype: torch.dtype = BF16
) -> torch.Tensor:
    """dy[M,N], w[N,K] bf16 → dx[M,K] in out_dtype; the chain runs along N, cut in `segments`."""
    weight, dx = checked("gemm_dx", dy, w, 0, out_dtype)
    return _multiply(dx, dy, weight, segments)
