"""RMSNorm on the CPU."""

import torch

from rl_kernel.errors import ShapeError
from rl_kernel.ops.tensors import BF16, F32, check, check_same, extension, threads


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """x[...,n] bf16, w[n] bf16 -> y of x's shape, contiguous. The last two dimensions of x must be contiguous."""
    n = x.shape[-1]
    check("rms_norm", "w", w, BF16, (n,))
    inner, stride, rows = _rows("rms_norm", "x", x, n)
    y = torch.empty(x.shape, dtype=BF16)
    extension.rms_norm(y.data_ptr(), x.data_ptr(), inner, stride, 0, 0, w.data_ptr(), rows, n, eps, threads())
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise sum = bf16(x + residual): x and residual[...,n] bf16, w[n] -> (y, sum)."""
    n = x.shape[-1]
    check("add_rms_norm", "w", w, BF16, (n,))
    check("add_rms_norm", "x", x, BF16, (None,) * x.dim())
    check_same("add_rms_norm", "residual", residual, x)
    y, total = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // n
    extension.rms_norm(
        y.data_ptr(), x.data_ptr(), max(rows, 1), 0, residual.data_ptr(), total.data_ptr(), w.data_ptr(), rows, n, eps,
        threads(),
    )  # fmt: skip
    return y, total


def rms_norm_backward(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float, dw: torch.Tensor) -> torch.Tensor:
    """Gradient: dy and x[...,n] bf16, w[n], dw[G,n] fp32 -> dx; row r of x adds to dw[r % G] in place."""
    n = x.shape[-1]
    check("rms_norm_backward", "w", w, BF16, (n,))
    check("rms_norm_backward", "dw", dw, F32, (None, n))
    if dy.shape != x.shape:
        raise ShapeError(f"rms_norm_backward: dy has shape {list(dy.shape)}; x has {list(x.shape)}")
    x_inner, x_stride, rows = _rows("rms_norm_backward", "x", x, n)
    dy_inner, dy_stride, _ = _rows("rms_norm_backward", "dy", dy, n)
    dx = torch.empty(x.shape, dtype=BF16)
    extension.rms_norm_backward(
        dx.data_ptr(), dw.data_ptr(), dw.shape[0], dy.data_ptr(), dy_inner, dy_stride, x.data_ptr(), x_inner, x_stride,
        w.data_ptr(), rows, n, eps, threads(),
    )  # fmt: skip
    return dx


def _rows(op: str, name: str, x: torch.Tensor, n: int) -> tuple[int, int, int]:
    """Return (rows that follow each other, elements from one such run to the next, all rows)."""
    rows = x.numel() // n if n else 0
    right = x.dtype is BF16 and x.is_cpu and n
    if right and x.is_contiguous():
        return max(rows, 1), 0, rows
    if right and x.dim() == 3 and x.stride(2) == 1 and (x.stride(1) == n or x.shape[1] == 1):
        return x.shape[1], x.stride(0), rows
    if right and x.dim() == 2 and x.stride(1) == 1:
        return 1, x.stride(0), rows
    raise ShapeError(
        f"{op}: {name} is {x.dtype} {list(x.shape)} on {x.device}, strides {list(x.stride())}; "
        "it must be bfloat16 on cpu with contiguous rows, at most the first dimension apart"
    )
