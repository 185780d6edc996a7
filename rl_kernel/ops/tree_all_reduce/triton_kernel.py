"""The tree over ranks on GPUs: an all-gather moves the fp32 partials, one kernel adds them by logical index.

R ranks. The transport never adds, so its order cannot matter.
"""

import torch
import torch.distributed as dist

from rl_kernel.ops.accelerator import require
from rl_kernel.ops.triton_tree import tree_sum

__all__ = ["tree_all_reduce", "tree_sum"]


def tree_all_reduce(
    partial: torch.Tensor, group: dist.ProcessGroup | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Every rank's fp32 partial […] → their tree sum by rank, in out_dtype, on every rank."""
    require("tree_all_reduce", "partial", partial.reshape(-1), torch.float32, None)
    ranks = dist.get_world_size(group)
    parts = torch.empty((ranks, *partial.shape), dtype=torch.float32, device=partial.device)
    dist.all_gather_into_tensor(parts.view(-1), partial.reshape(-1), group=group)
    return tree_sum(parts, out_dtype)
