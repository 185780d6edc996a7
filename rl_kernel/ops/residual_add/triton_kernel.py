"""The residual sum on GPUs, where no norm follows it."""

import torch
import triton
import triton.language as tl

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import cdiv, require
from rl_kernel.ops.triton_scalar import narrow


@triton.jit
def residual_add_kernel(y, a, b, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program adds BLOCK values."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < n
    left = tl.load(a + i, mask=here, other=0.0).to(tl.float32)
    right = tl.load(b + i, mask=here, other=0.0).to(tl.float32)
    tl.store(y + i, narrow(left + right), mask=here)


def residual_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The bf16 sum of two bf16 tensors of one shape."""
    if a.shape != b.shape:
        raise ShapeError(f"residual_add: shapes {list(a.shape)} and {list(b.shape)} differ")
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    require("residual_add", "a", flat_a, torch.bfloat16, None)
    require("residual_add", "b", flat_b, torch.bfloat16, None)
    y = torch.empty_like(flat_a)
    if y.numel():
        residual_add_kernel[(cdiv(y.numel(), 2048),)](
            y, flat_a, flat_b, y.numel(), BLOCK=2048, num_warps=4, enable_fp_fusion=False
        )
    return y.view(a.shape)
