"""Gradients of the fused LM head on GPUs. T tokens, K features, V vocabulary rows.

The logit gradient exists for one stretch of the vocabulary at a time: recomputed, used for dh and dW, forgotten. The
chain of dh goes on from stretch to stretch in fp32, so that where a stretch ends changes no bit.
"""

import torch
import triton
import triton.language as tl

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import BF16, EX2, F32, I64, cdiv, require, require_rows
from rl_kernel.ops.triton_matmul import product
from rl_kernel.ops.triton_scalar import LOG2E, exp2, narrow
from rl_kernel.ops.triton_tree import tree_sum

GRADIENTS = 1 << 26  # logit gradients held at once


@triton.jit(do_not_specialize=["tokens"])
def logit_gradient_kernel(
    dlogits, h, w, target, lse, dlogp, temperature, tokens, h_stride, vocab_start, vocab, k, first, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, HEATED: tl.constexpr, EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """dlogits[T,width] = bf16((onehot - p) * dlogp / temperature) for the rows first .. first+width of w."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    h_at = h + tl.where(row < tokens, row, 0).to(tl.int64)[:, None] * h_stride + i[None, :]
    w_at = w + tl.where(column < width, first + column, 0).to(tl.int64)[None, :] * k + i[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(k, BK)):
        if EVEN:
            left, right = tl.load(h_at), tl.load(w_at)
        else:
            left = tl.load(h_at, mask=(i < k - step * BK)[None, :], other=0.0)
            right = tl.load(w_at, mask=(i < k - step * BK)[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
        h_at += BK
        w_at += BK
    z = tl.div_rn(acc, tl.zeros_like(acc) + temperature) if HEATED else acc
    inside = row < tokens
    down = tl.load(dlogp + row, mask=inside, other=0.0)
    c = tl.div_rn(down, tl.zeros_like(down) + temperature)
    p = exp2((z - tl.load(lse + row, mask=inside, other=0.0)[:, None]) * LOG2E, EX2)
    wanted = tl.load(target + row, mask=inside, other=-1) - vocab_start
    hot = (first + column)[None, :] == wanted[:, None]
    d = narrow((tl.where(hot, 1.0, 0.0) - p) * c[:, None])
    d = tl.where((first + column < vocab)[None, :], d, tl.zeros_like(d))
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(dlogits + at, d, mask=inside[:, None] & (column < width)[None, :])


def launch_for(tokens: int) -> tuple[int, int, int, int, int]:
    """BM, BN, BK, warps and stages of the fused head, a static table; tile shapes change no bit."""
    if tokens <= 16:
        return 16, 64, 128, 4, 5
    if tokens <= 32:
        return 32, 64, 128, 4, 5
    if tokens <= 64:
        return 64, 128, 64, 8, 6
    return 128, 128, 64, 8, 3


def linear_logp_backward(
    dlogp: torch.Tensor, h: torch.Tensor, w: torch.Tensor, target: torch.Tensor, lse: torch.Tensor,
    *, temperature: float, vocab: int, main_grad: torch.Tensor | None, segments: int = 1, vocab_start: int = 0,
    out_dtype: torch.dtype = BF16,
) -> torch.Tensor:  # fmt: skip
    """dlogp[T] fp32 and the forward's arguments → dh[T,K] of out_dtype; main_grad[V,K] fp32 continues in place.

    `segments` cuts the vocabulary that w holds. A shard gives its vocab_start, the lse of the whole vocabulary and
    out_dtype fp32, and the tree over ranks finishes dh. main_grad None: the weight is frozen.
    """
    op = "linear_logp_backward"
    require(op, "w", w, BF16, None, None)
    require_rows(op, "h", h, None, w.shape[1])
    (tokens, k), rows = h.shape, w.shape[0]
    require(op, "target", target, I64, tokens)
    require(op, "dlogp", dlogp, F32, tokens)
    require(op, "lse", lse, F32, tokens)
    if main_grad is not None:
        require(op, "main_grad", main_grad, F32, *w.shape)
    if segments < 1 or rows % segments:
        raise ShapeError(f"{op}: segments is {segments}; it must divide the {rows} ids of w")
    if out_dtype not in (BF16, F32):
        raise ShapeError(f"{op}: out_dtype is {out_dtype}; it must be torch.bfloat16 or torch.float32")
    if not tokens:
        return torch.empty((0, k), dtype=out_dtype, device=h.device)
    parts = torch.zeros((segments, tokens, k), dtype=F32, device=h.device)
    stretch = max(64, GRADIENTS // tokens // 64 * 64)
    for segment in range(segments):
        begin, end = segment * (rows // segments), (segment + 1) * (rows // segments)
        for first in range(begin, end, stretch):
            last = min(end, first + stretch)
            dlogits = _logit_gradient(dlogp, h, w, target, lse, temperature, vocab_start, vocab, first, last)
            if main_grad is not None:
                product(main_grad[first:last], dlogits.t(), h, segments=1, keep=True)
            product(parts[segment], dlogits, w[first:last], segments=1, keep=True)
    return tree_sum(parts, out_dtype)


def _logit_gradient(
    dlogp: torch.Tensor, h: torch.Tensor, w: torch.Tensor, target: torch.Tensor, lse: torch.Tensor,
    temperature: float, vocab_start: int, vocab: int, first: int, last: int,
) -> torch.Tensor:  # fmt: skip
    (tokens, k), width = h.shape, last - first
    dlogits = torch.empty((tokens, width), dtype=BF16, device=h.device)
    bm, bn, bk, warps, stages = launch_for(tokens)
    logit_gradient_kernel[(cdiv(tokens, bm), cdiv(width, bn))](
        dlogits, h, w, target, lse, dlogp, temperature, tokens, h.stride(0), vocab_start, vocab - vocab_start, k,
        first, width,
        BM=bm, BN=bn, BK=bk, EVEN=k % bk == 0, HEATED=temperature != 1.0, EX2=EX2,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    return dlogits
