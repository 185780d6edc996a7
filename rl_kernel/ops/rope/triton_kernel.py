"""Rotary position embedding on GPUs: T tokens, H and G heads, D head_dim, P positions of the shipped table."""

import torch
import triton
import triton.language as tl

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import BF16, F32, I64, cdiv, power_of_two, require, require_rows
from rl_kernel.ops.triton_scalar import narrow

MANY = 2048  # tokens from which a program of one tensor takes more heads, and one of two fewer warps


@triton.jit(do_not_specialize=["x_heads", "u_heads"])  # one head as a constant would be another type
def rope_kernel(
    y, x, z, u, cos, sin, positions, x_heads, u_heads, x_token, u_token, table,
    HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, INVERSE: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program rotates ROWS heads of one token, which share its angles: of x into y, past x's last of u into z.

    WIDTH: HALF, rounded up to a power of two; x_token, u_token: elements from one token to the next.
    """
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    blocks = tl.cdiv(x_heads, ROWS)
    if block >= blocks:
        block -= blocks
        y, x, x_heads, x_token = z, u, u_heads, u_token
    head = block * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, WIDTH)
    here = (head < x_heads)[:, None] & (i < HALF)[None, :]
    position = tl.load(positions + token)
    # A position outside the table turns its rows into NaN: nothing on the GPU can raise.
    inside = (i < HALF) & (position >= 0) & (position < table)
    c = tl.load(cos + position * HALF + i, mask=inside, other=float("nan"))[None, :]
    s = tl.load(sin + position * HALF + i, mask=inside, other=float("nan"))[None, :]
    # Multiplied by -1, since Triton's -x is 0 - x and loses the sign of zero.
    if INVERSE:
        s = s * -1.0
    x_at = x + token * x_token + head[:, None] * (2 * HALF) + i[None, :]
    y_at = y + (token * x_heads + head[:, None]) * (2 * HALF) + i[None, :]
    x1 = tl.load(x_at, mask=here, other=0.0).to(tl.float32)
    x2 = tl.load(x_at + HALF, mask=here, other=0.0).to(tl.float32)
    c, s = tl.broadcast_to(c, x1.shape), tl.broadcast_to(s, x1.shape)
    tl.store(y_at, narrow(tl.fma(x1, c, (x2 * s) * -1.0)), mask=here)
    tl.store(y_at + HALF, narrow(tl.fma(x2, c, x1 * s)), mask=here)


def _rotate(
    op: str, pair: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
    inverse: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Rotate one tensor, or two of the same tokens in one launch."""
    strides = [require_rows(op, "x", pair[0], None, None, None)]
    tokens, _, dim = pair[0].shape
    strides += [require_rows(op, "k", x, tokens, None, dim) for x in pair[1:]]
    if dim % 2:
        raise ShapeError(f"{op}: head_dim {dim} is odd; halves are rotated against each other, so {dim + 1} would work")
    require(op, "cos", cos, F32, None, dim // 2)
    require(op, "sin", sin, F32, cos.shape[0], dim // 2)
    require(op, "positions", positions, I64, tokens)
    rotated = tuple(torch.empty(x.shape, dtype=BF16, device=x.device) for x in pair)
    heads = [x.shape[1] for x in pair]
    width, (rows, warps) = power_of_two(dim // 2), _launch(tokens, len(pair))
    grid = (tokens, sum(cdiv(h, rows) for h in heads))
    if all(grid):
        rope_kernel[grid](
            rotated[0], pair[0], rotated[-1], pair[-1], cos, sin, positions, heads[0], heads[-1], strides[0],
            strides[-1], cos.shape[0],
            HALF=dim // 2, WIDTH=width, ROWS=rows, INVERSE=inverse, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return rotated


def _launch(tokens: int, tensors: int) -> tuple[int, int]:
    """Heads a program, warps; by the shape alone."""
    if tokens < MANY:
        return 8, 4
    return (32, 4) if tensors == 1 else (8, 2)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x[T,H,D] bf16, cos and sin[P,D/2] fp32, positions[T] int64 → rotated [T,H,D]; a position >= P gives NaN."""
    return _rotate("rope", (x,), cos, sin, positions, False)[0]


def rope_pair(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope` of q[T,H,D] and of k[T,G,D], in one launch."""
    rotated_q, rotated_k = _rotate("rope_pair", (q, k), cos, sin, positions, False)
    return rotated_q, rotated_k


def rope_backward(dout: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """dout[T,H,D] and the forward's tables → dx[T,H,D]."""
    return _rotate("rope_backward", (dout,), cos, sin, positions, True)[0]
