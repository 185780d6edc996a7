"""RoPE on the CPU."""

import torch

from rl_kernel.errors import ShapeError
from rl_kernel.ops.tensors import BF16, F32, I64, check, check_rows, extension, threads


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x[T,H,D] bf16, cos and sin[P,D/2] fp32, positions[T] int64 -> rotated x. ShapeError outside the table."""
    return _rotate("rope", x, cos, sin, positions, 1.0)


def rope_pair(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope` of q[T,H,D] and of k[T,G,D]."""
    return rope(q, cos, sin, positions), rope(k, cos, sin, positions)


def rope_backward(dout: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The gradient of `rope`: the inverse rotation of dout[T,H,D]."""
    return _rotate("rope_backward", dout, cos, sin, positions, -1.0)


def _rotate(
    op: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, sign: float
) -> torch.Tensor:
    token = check_rows(op, "x", x, (None, None, None))
    tokens, heads, dim = x.shape
    if dim % 2:
        raise ShapeError(f"{op}: head_dim is {dim}; it must be even")
    check(op, "cos", cos, F32, (None, dim // 2))
    check(op, "sin", sin, F32, (cos.shape[0], dim // 2))
    check(op, "positions", positions, I64, (tokens,))
    out = torch.empty(tokens, heads, dim, dtype=BF16)
    extension.rope(
        out.data_ptr(), x.data_ptr(), token, cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), cos.shape[0], tokens,
        heads, dim, sign, threads(),
    )  # fmt: skip
    return out
