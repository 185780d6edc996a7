"""GEMM on NVIDIA GPUs: cuBLASLt where it has the contract's bits, the Triton kernel everywhere else.

With split-K refused, cuBLASLt adds the k-groups of the sm90 MMA model in one ascending chain, so its bits are the
contract's; it has no tree over segments and no chain that continues from a main gradient, and at few rows it is slow.
Which of the two runs is a function of the shape alone, and both have the same bits. One limit: where a result is NaN,
cuBLASLt stores 0x7fff, not 0x7fc0; every op that follows stores the one NaN again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rl_kernel.ops.accelerator import BF16, F32, PackedWeight, pack
from rl_kernel.ops.gemm.triton_kernel import checked, gemm_dw_
from rl_kernel.ops.triton_matmul import product

__all__ = ["PackedWeight", "gemm", "gemm_dw_", "gemm_dx", "pack"]

MIN_ROWS = 32
MIN_FEATURES = 256  # of the summed index and of the columns; smaller products are launch-bound anyway
ALIGNMENT = 8  # elements; below 16-byte rows cuBLASLt takes other kernels


@contextmanager
def one_chain() -> Iterator[None]:
    """Within: cuBLASLt only, and split-K refused. The process's own settings come back afterwards."""
    matmul = torch.backends.cuda.matmul
    before = torch.backends.cuda.preferred_blas_library()
    reduced = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
        matmul.allow_bf16_reduced_precision_reduction = reduced


def serves(rows: int, total: int, columns: int, segments: int) -> bool:
    """Whether cuBLASLt computes this product: large enough, aligned, one chain."""
    large = rows >= MIN_ROWS and min(total, columns) >= MIN_FEATURES
    return large and segments == 1 and total % ALIGNMENT == 0 and columns % ALIGNMENT == 0


def _multiply(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, segments: int) -> torch.Tensor:
    aligned = a.stride(0) % ALIGNMENT == 0 and a.data_ptr() % 16 == 0
    if not aligned or not serves(a.shape[0], a.shape[1], b.shape[1], segments):
        return product(y, a, b, segments=segments)
    with one_chain():
        if y.dtype is F32:
            return torch.mm(a, b, out_dtype=F32)
        return torch.mm(a, b, out=y)


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
