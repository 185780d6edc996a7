"""The neighbour-pair tree over fp32 parts that lie in memory: partial sums of ranks, or of segments."""

import torch
import triton
import triton.language as tl

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import cdiv, require
from rl_kernel.ops.triton_scalar import stored, tree_of

MAX_RANKS = 64


@triton.jit
def tree_sum_kernel(
    y, parts, n, RANKS: tl.constexpr, BLOCK: tl.constexpr, FP32: tl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program adds BLOCK values over RANKS parts: neighbours in pairs, an odd last one moving up."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here, at = i < n, i
    values = ()
    for _ in tl.static_range(RANKS):
        values = values + (tl.load(parts + at, mask=here, other=0.0),)
        at += n  # in 64 bits
    tl.store(y + i, stored(tree_of(values), FP32), mask=here)


def tree_sum(parts: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """parts[R,…] fp32 → their tree sum, […] in out_dtype (bf16 or fp32)."""
    if out_dtype not in (torch.float32, torch.bfloat16):
        raise ShapeError(f"tree_sum: out_dtype {out_dtype}; the contract has torch.bfloat16 and torch.float32")
    if parts.dim() == 0 or not 1 <= parts.shape[0] <= MAX_RANKS:
        raise ShapeError(f"tree_sum: parts is {list(parts.shape)}; the kernel is unrolled for 1 to {MAX_RANKS} ranks")
    flat = parts.reshape(parts.shape[0], -1)
    require("tree_sum", "parts", flat, torch.float32, None, None)
    y = torch.empty(parts.shape[1:], dtype=out_dtype, device=parts.device)
    if y.numel():
        tree_sum_kernel[(cdiv(y.numel(), 1024),)](
            y, flat, y.numel(), RANKS=parts.shape[0], BLOCK=1024, FP32=out_dtype == torch.float32,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y
