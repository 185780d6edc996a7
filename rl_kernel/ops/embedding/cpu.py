"""Embedding on the CPU."""

import torch

from rl_kernel.ops.tensors import BF16, F32, I64, check, extension, threads


def embedding(ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """ids[T] int64, w[V,K] bf16 -> [T,K] bf16. ShapeError for an id outside the table."""
    check("embedding", "ids", ids, I64, (None,))
    check("embedding", "w", w, BF16, (None, None))
    vocab, k = w.shape
    y = torch.empty(ids.shape[0], k, dtype=BF16)
    extension.embedding(y.data_ptr(), ids.data_ptr(), w.data_ptr(), vocab, ids.shape[0], k, threads())
    return y


def embedding_dw_(main_grad: torch.Tensor, dy: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Add dy[T,K] bf16 to the rows ids[T] of main_grad[V,K] fp32, in order and in place; returns main_grad."""
    check("embedding_dw_", "ids", ids, I64, (None,))
    check("embedding_dw_", "main_grad", main_grad, F32, (None, None))
    vocab, k = main_grad.shape
    check("embedding_dw_", "dy", dy, BF16, (ids.shape[0], k))
    extension.embedding_dw(main_grad.data_ptr(), dy.data_ptr(), ids.data_ptr(), vocab, ids.shape[0], k, threads())
    return main_grad
