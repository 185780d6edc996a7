"""The all-reduce of strict runs: gather every rank's fp32 partial, then add them up in a tree by rank."""

import torch
import torch.distributed as dist

from rl_kernel.errors import ShapeError
from rl_kernel.ops.tensors import BF16, F32, check, extension, threads


def tree_sum(parts: torch.Tensor, out_dtype: torch.dtype = BF16) -> torch.Tensor:
    """parts[R,...] fp32 -> their tree over R, of out_dtype (bf16 or fp32)."""
    check("tree_sum", "parts", parts, F32, (None,) * parts.dim())
    if parts.dim() == 0 or parts.shape[0] == 0:
        raise ShapeError(f"tree_sum: parts is {list(parts.shape)}; the first dimension must count at least one rank")
    if out_dtype is not BF16 and out_dtype is not F32:
        raise ShapeError(f"tree_sum: out_dtype is {out_dtype}; it must be torch.bfloat16 or torch.float32")
    out = torch.empty(parts.shape[1:], dtype=out_dtype)
    out32, out16 = (0, out.data_ptr()) if out_dtype is BF16 else (out.data_ptr(), 0)
    extension.tree_sum(out32, out16, parts.data_ptr(), parts.shape[0], out.numel(), threads())
    return out


def tree_all_reduce(
    partial: torch.Tensor, group: dist.ProcessGroup | None = None, out_dtype: torch.dtype = BF16
) -> torch.Tensor:
    """Sum `partial` (fp32, any shape) over the ranks of `group` (None: the default group) in logical order.

    Every rank gets the same bits, and they do not depend on the transport's own order. Returns out_dtype.
    """
    check("tree_all_reduce", "partial", partial, F32, (None,) * partial.dim())
    parts = torch.empty(dist.get_world_size(group), *partial.shape, dtype=F32)
    dist.all_gather(list(parts.unbind(0)), partial, group=group)
    return tree_sum(parts, out_dtype)
