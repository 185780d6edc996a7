"""The tree over ranks on GPUs: fp32 partials move, one kernel adds them by logical index.

On one host through memory that the ranks map from each other (`symmetric`), across hosts by NCCL; the bits are the
same, since no transport ever adds. Which of the two serves follows from where the ranks are. R ranks.
"""

import torch
import torch.distributed as dist

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import require
from rl_kernel.ops.tree_all_reduce import symmetric
from rl_kernel.ops.triton_tree import MAX_RANKS, tree_sum

__all__ = ["gathered", "transport", "tree_all_reduce", "tree_sum"]

SCATTER = 1 << 20  # values from which scattering partials and gathering sums moves less than gathering all partials


def tree_all_reduce(
    partial: torch.Tensor, group: dist.ProcessGroup | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Every rank's fp32 partial […] → their tree sum by rank, in out_dtype (bf16 or fp32), on every rank.

    All ranks of `group` (None: the default one) call it with the same shape. ShapeError for a number of ranks that is
    no power of two; PlanError where a group's very first call is captured in a CUDA graph.
    """
    require("tree_all_reduce", "partial", partial, torch.float32, *partial.shape)
    if out_dtype not in (torch.float32, torch.bfloat16):
        raise ShapeError(f"tree_all_reduce: out_dtype {out_dtype}; the contract has torch.bfloat16 and torch.float32")
    ranks = dist.get_world_size(group)
    check_ranks(ranks)
    if ranks == 1:
        return tree_sum(partial[None], out_dtype)
    peers = symmetric.peers(_group(group), partial.device)
    return gathered(partial, group, out_dtype) if peers is None else peers.all_reduce(partial, out_dtype)


def check_ranks(ranks: int) -> None:
    """Raise ShapeError unless the tree over this many ranks is balanced, which is what has a proof."""
    if ranks < 1 or ranks & (ranks - 1) or ranks > MAX_RANKS:
        raise ShapeError(
            f"tree_all_reduce: {ranks} ranks; a balanced tree has a power of two up to {MAX_RANKS}, "
            f"the nearest below is {1 << (min(max(ranks, 1), MAX_RANKS).bit_length() - 1)}"
        )


def transport(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """How a group's partials move: `symmetric memory` or `gather`. A collective call, as the first reduction is."""
    return "gather" if symmetric.peers(_group(group), device) is None else "symmetric memory"


def gathered(partial: torch.Tensor, group: dist.ProcessGroup | None, out_dtype: torch.dtype) -> torch.Tensor:
    """The tree through NCCL, between hosts too: all partials to all, or, if they are large, parts to their owners."""
    ranks, n = dist.get_world_size(group), partial.numel()
    if n < SCATTER or n % ranks:
        parts = torch.empty((ranks, *partial.shape), dtype=torch.float32, device=partial.device)
        dist.all_gather_into_tensor(parts.view(-1), partial.view(-1), group=group)
        return tree_sum(parts, out_dtype)
    parts = torch.empty((ranks, n // ranks), dtype=torch.float32, device=partial.device)
    dist.all_to_all_single(parts, partial.view(ranks, -1), group=group)
    y = torch.empty(partial.shape, dtype=out_dtype, device=partial.device)
    dist.all_gather_into_tensor(y.view(-1), tree_sum(parts, out_dtype), group=group)
    return y


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = group or dist.group.WORLD
    assert found is not None  # torch has checked that the default group exists
    return found
