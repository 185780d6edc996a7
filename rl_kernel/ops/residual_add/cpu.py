"""The residual sum on the CPU."""

import torch

from rl_kernel.ops.tensors import BF16, check, check_same, extension, threads


def residual_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bf16(a + b) of two contiguous bf16 tensors of one shape."""
    check("residual_add", "a", a, BF16, (None,) * a.dim())
    check_same("residual_add", "b", b, a)
    y = torch.empty_like(a)
    extension.residual_add(y.data_ptr(), a.data_ptr(), b.data_ptr(), a.numel(), threads())
    return y
