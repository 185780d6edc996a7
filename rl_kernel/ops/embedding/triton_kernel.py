"""Embedding look-up on GPUs and its gradient: T tokens, V vocabulary, K features."""

import torch
import triton
import triton.language as tl

from rl_kernel.ops.accelerator import cdiv, require
from rl_kernel.ops.triton_scalar import canonical, narrow


@triton.jit
def embedding_kernel(y, ids, w, vocab, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program copies BLOCK features of one token."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token)
    # An id outside the table gives a row of NaN: nothing on the GPU can raise.
    inside = (row >= 0) & (row < vocab)
    value = tl.load(w + row * k + i, mask=(i < k) & inside, other=float("nan")).to(tl.float32)
    tl.store(y + token * k + i, narrow(value + 0.0), mask=i < k)


@triton.jit
def embedding_dw_kernel(main_grad, dy, sorted_ids, order, tokens, vocab, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first of each run of equal ids adds the whole run, in token order (the sort is stable)."""
    first = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(sorted_ids + first)
    before = tl.load(sorted_ids + first - 1, mask=first > 0, other=-1)
    if (row != before) & (row >= 0) & (row < vocab):
        total = tl.load(main_grad + row * k + i, mask=i < k, other=0.0)
        here = first
        while tl.load(sorted_ids + here, mask=here < tokens, other=-1) == row:
            token = tl.load(order + here)
            total += tl.load(dy + token * k + i, mask=i < k, other=0.0).to(tl.float32)
            here += 1
        tl.store(main_grad + row * k + i, canonical(total), mask=i < k)


def embedding(ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """ids[T] int64, w[V,K] bf16 → [T,K] bf16; an id outside the table gives NaN."""
    require("embedding", "w", w, torch.bfloat16, None, None)
    require("embedding", "ids", ids, torch.int64, None)
    y = torch.empty((ids.shape[0], w.shape[1]), dtype=w.dtype, device=w.device)
    if y.numel():
        embedding_kernel[(ids.shape[0], cdiv(w.shape[1], 1024))](
            y, ids, w, w.shape[0], w.shape[1], BLOCK=1024, num_warps=4, enable_fp_fusion=False
        )
    return y


def embedding_dw_(main_grad: torch.Tensor, dy: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Add dy[T,K] bf16 to main_grad[V,K] fp32, in place, at the rows ids[T] int64, tokens in order; returns it."""
    require("embedding_dw_", "main_grad", main_grad, torch.float32, None, None)
    require("embedding_dw_", "dy", dy, torch.bfloat16, None, main_grad.shape[1])
    require("embedding_dw_", "ids", ids, torch.int64, dy.shape[0])
    if not dy.numel():
        return main_grad
    sorted_ids, order = torch.sort(ids, stable=True)
    vocab, k = main_grad.shape
    embedding_dw_kernel[(ids.shape[0], cdiv(k, 1024))](
        main_grad, dy, sorted_ids, order, ids.shape[0], vocab, k, BLOCK=1024, num_warps=4, enable_fp_fusion=False
    )
    return main_grad
