"""Rotary position embedding on GPUs: T tokens, H heads, D head_dim, P positions of the shipped table."""

import torch
import triton
import triton.language as tl

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import BF16, F32, I64, require, require_rows
from rl_kernel.ops.triton_scalar import narrow


@triton.jit
def rope_kernel(
    y, x, cos, sin, positions, rows, heads, stride, table,
    HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, INVERSE: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program rotates ROWS of the T*H rows; WIDTH: HALF, rounded up to a power of two; stride: of x's tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, WIDTH)
    here = (row[:, None] < rows) & (i[None, :] < HALF)
    position = tl.load(positions + row // heads, mask=row < rows, other=0)
    inside = here & (position >= 0)[:, None] & (position < table)[:, None]
    # A position outside the table turns its row into NaN: nothing on the GPU can raise.
    angle = position[:, None] * HALF + i[None, :]
    c = tl.load(cos + angle, mask=inside, other=float("nan"))
    s = tl.load(sin + angle, mask=inside, other=float("nan"))
    # Multiplied by -1, since Triton's -x is 0 - x and loses the sign of zero.
    if INVERSE:
        s = s * -1.0
    at = row.to(tl.int64)[:, None] * (2 * HALF) + i[None, :]
    x_at = ((row // heads).to(tl.int64) * stride + (row % heads) * (2 * HALF))[:, None] + i[None, :]
    x1 = tl.load(x + x_at, mask=here, other=0.0).to(tl.float32)
    x2 = tl.load(x + x_at + HALF, mask=here, other=0.0).to(tl.float32)
    tl.store(y + at, narrow(tl.fma(x1, c, (x2 * s) * -1.0)), mask=here)
    tl.store(y + at + HALF, narrow(tl.fma(x2, c, x1 * s)), mask=here)


def _rotate(
    op: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, inverse: bool
) -> torch.Tensor:
    stride = require_rows(op, "x", x, None, None, None)
    tokens, heads, dim = x.shape
    if dim % 2:
        raise ShapeError(f"{op}: head_dim {dim} is odd; halves are rotated against each other, so {dim + 1} would work")
    require(op, "cos", cos, F32, None, dim // 2)
    require(op, "sin", sin, F32, cos.shape[0], dim // 2)
    require(op, "positions", positions, I64, tokens)
    y = torch.empty((tokens, heads, dim), dtype=BF16, device=x.device)
    rows, width = tokens * heads, triton.next_power_of_2(dim // 2)
    per_program = max(1, 1024 // width)
    if rows:
        rope_kernel[(triton.cdiv(rows, per_program),)](
            y, x, cos, sin, positions, rows, heads, stride, cos.shape[0],
            HALF=dim // 2, WIDTH=width, ROWS=per_program, INVERSE=inverse, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x[T,H,D] bf16, cos and sin[P,D/2] fp32, positions[T] int64 → rotated [T,H,D]; a position >= P gives NaN."""
    return _rotate("rope", x, cos, sin, positions, False)


def rope_backward(dout: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """dout[T,H,D] and the forward's tables → dx[T,H,D]."""
    return _rotate("rope_backward", dout, cos, sin, positions, True)
