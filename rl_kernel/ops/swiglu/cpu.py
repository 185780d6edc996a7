"""SwiGLU on the CPU."""

import torch

from rl_kernel.errors import ShapeError
from rl_kernel.ops.tensors import BF16, check, extension, threads


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x[T,2I] bf16 = gate, up -> silu(gate) * up [T,I] bf16."""
    rows, width = _check("swiglu", x)
    y = torch.empty(rows, width, dtype=BF16)
    extension.swiglu(y.data_ptr(), x.data_ptr(), rows, width, threads())
    return y


def swiglu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy[T,I] bf16, x[T,2I] bf16 -> dx[T,2I] bf16."""
    rows, width = _check("swiglu_backward", x)
    check("swiglu_backward", "dy", dy, BF16, (rows, width))
    dx = torch.empty_like(x)
    extension.swiglu_backward(dx.data_ptr(), dy.data_ptr(), x.data_ptr(), rows, width, threads())
    return dx


def _check(op: str, x: torch.Tensor) -> tuple[int, int]:
    check(op, "x", x, BF16, (None, None))
    rows, width = x.shape
    if width % 2:
        raise ShapeError(f"{op}: x has {width} columns; gate and up need an even number")
    return rows, width // 2
