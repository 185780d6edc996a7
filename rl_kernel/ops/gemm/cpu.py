"""The three products of a linear layer on the CPU: one kernel, three ways in which the operands lie in memory."""

import torch

from rl_kernel.errors import ShapeError
from rl_kernel.ops.packed_weight import PackedWeight, pack
from rl_kernel.ops.tensors import BF16, F32, check, check_rows, extension, threads

__all__ = ["PackedWeight", "gemm", "gemm_dw_", "gemm_dx", "pack"]


def gemm(
    x: torch.Tensor, w: torch.Tensor | PackedWeight, *, segments: int = 1, out_dtype: torch.dtype = BF16
) -> torch.Tensor:
    """x[M,K] bf16, w[N,K] bf16 or packed -> [M,N] of out_dtype (bf16 or fp32). An unpacked weight is packed anew.

    ShapeError if K differs or `segments` does not divide it.
    """
    if isinstance(w, PackedWeight):
        n, k, words = w.n, w.k, w.words
    else:
        check("gemm", "w", w, BF16, (None, None))
        n, k = w.shape
        words = torch.empty(extension.packed_words(n, k), dtype=torch.int32)
        extension.pack(words.data_ptr(), w.data_ptr(), n, k, k, threads())
    lda = check_rows("gemm", "x", x, (None, k))
    out = _output("gemm", x.shape[0], n, out_dtype, k, segments)
    _multiply(out, x, lda, False, words, k, segments, False)
    return out


def gemm_dx(dy: torch.Tensor, w: torch.Tensor, *, segments: int = 1, out_dtype: torch.dtype = BF16) -> torch.Tensor:
    """dy[M,N] bf16, w[N,K] bf16 -> dx[M,K] of out_dtype; `segments` cuts N."""
    check("gemm_dx", "w", w, BF16, (None, None))
    n, k = w.shape
    lda = check_rows("gemm_dx", "dy", dy, (None, n))
    out = _output("gemm_dx", dy.shape[0], k, out_dtype, n, segments)
    _multiply(out, dy, lda, False, _columns(w, n, k, k), n, segments, False)
    return out


def gemm_dw_(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Continue main_grad[N,K] fp32 with the chain over tokens of dy[T,N]*x[T,K] (bf16), in place; returns main_grad."""
    check("gemm_dw_", "main_grad", main_grad, F32, (None, None))
    n, k = main_grad.shape
    ldx = check_rows("gemm_dw_", "x", x, (None, k))
    tokens = x.shape[0]
    ldy = check_rows("gemm_dw_", "dy", dy, (tokens, n))
    _multiply(main_grad, dy, ldy, True, _columns(x, tokens, k, ldx), tokens, 1, True)
    return main_grad


def _output(op: str, m: int, n: int, dtype: torch.dtype, summed: int, segments: int) -> torch.Tensor:
    if dtype is not BF16 and dtype is not F32:
        raise ShapeError(f"{op}: out_dtype is {dtype}; it must be torch.bfloat16 or torch.float32")
    if segments != 1 and (segments < 1 or summed % segments):
        raise ShapeError(f"{op}: segments is {segments}; it must divide the summed dimension {summed}")
    return torch.empty(m, n, dtype=dtype)


def _columns(b: torch.Tensor, rows: int, columns: int, stride: int) -> torch.Tensor:
    words = torch.empty(extension.packed_words(columns, rows), dtype=torch.int32)
    extension.pack_columns(words.data_ptr(), b.data_ptr(), columns, rows, stride, threads())
    return words


def _multiply(
    out: torch.Tensor, a: torch.Tensor, lda: int, a_is_k_major: bool, b: torch.Tensor, summed: int, segments: int,
    resume: bool,
) -> None:  # fmt: skip
    address = out.data_ptr()
    out32, out16 = (0, address) if out.dtype is BF16 else (address, 0)
    m, n = out.shape
    extension.multiply(
        out32, out16, a.data_ptr(), lda, a_is_k_major, b.data_ptr(), m, n, summed, segments, resume, threads()
    )
