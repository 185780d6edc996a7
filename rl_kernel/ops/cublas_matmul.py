"""cuBLASLt with split-K refused: the sm90 MMA model's k-groups in one ascending chain, the contract's bits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MIN_ROWS = 32  # below, cuBLASLt without split-K is slow
MIN_FEATURES = 256  # of the summed index and of the columns; smaller products are launch-bound anyway
ALIGNMENT = 8  # elements; below 16-byte rows cuBLASLt takes other kernels


@contextmanager
def one_chain() -> Iterator[None]:
    """Within: cuBLASLt only, and split-K refused. The process's own settings come back afterwards.

    Both settings are the whole process's: a product of another thread meanwhile has them too, and of two threads in
    here at once the first to leave takes split-K's refusal from the other. Strict engines launch from one at a time.
    """
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


def serves(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether y = a @ b is large enough and aligned: a function of shapes and layouts alone."""
    (rows, total), columns = a.shape, b.shape[1]
    large = rows >= MIN_ROWS and min(total, columns) >= MIN_FEATURES
    aligned = all(x % ALIGNMENT == 0 for x in (total, columns, a.stride(0), max(b.stride()))) and a.stride(1) == 1
    return large and aligned and (a.data_ptr() | b.data_ptr() | y.data_ptr()) % 16 == 0


def chain_product(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """y[m,n] (bf16 or fp32) <- a[m,s] @ b[s,n], one chain; see `serves`. A NaN is stored as the hardware has it."""
    with one_chain():
        if y.dtype == torch.float32:
            return torch.mm(a, b, out_dtype=torch.float32, out=y)
        return torch.mm(a, b, out=y)
