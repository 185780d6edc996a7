"""Rotary position embedding on GPUs: T tokens, H and G heads, D head_dim, P positions of the shipped table."""

import torch
import triton
import triton.language as tl

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import BF16, F32, I64, cdiv, power_of_two, require, require_rows
from rl_kernel.ops.triton_hopper import HOPPER, PLAIN, begin
from rl_kernel.ops.triton_scalar import narrow

MANY = 2048  # tokens from which a program takes more heads: of one tensor 32, of two all
ALL_HEADS = 64  # of one tensor, that a program can take


@triton.jit(do_not_specialize=["x_heads", "u_heads"])  # one head as a constant would be another type
def rope_kernel(
    y, x, z, u, cos, sin, positions, x_heads, u_heads, x_token, u_token, table,
    HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, INVERSE: tl.constexpr,
    HOPPER: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program rotates ROWS heads of one token, which share its angles: of x into y, past x's last of u into z.

    WIDTH: HALF, rounded up to a power of two; x_token, u_token: elements from one token to the next.
    """
    begin(HOPPER)
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


@triton.jit
def _places(start, heads, HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to the first halves of a token's heads, and which of them there are."""
    head, i = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    return start + head[:, None] * (2 * HALF) + i[None, :], (head < heads)[:, None] & (i < HALF)[None, :]


@triton.jit
def _store_rotated(y_at, here, x1, x2, c, s, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    c, s = tl.broadcast_to(c[None, :], x1.shape), tl.broadcast_to(s[None, :], x1.shape)
    # Multiplied by -1, since Triton's -x is 0 - x and loses the sign of zero.
    tl.store(y_at, narrow(tl.fma(x1, c, (x2 * s) * -1.0)), mask=here)
    tl.store(y_at + HALF, narrow(tl.fma(x2, c, x1 * s)), mask=here)


@triton.jit(do_not_specialize=["x_heads", "u_heads"])
def rope_pair_kernel(
    y, x, z, u, cos, sin, positions, x_heads, u_heads, x_token, u_token, table,
    HALF: tl.constexpr, WIDTH: tl.constexpr, X_ROWS: tl.constexpr, U_ROWS: tl.constexpr, HOPPER: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program rotates all heads of one token, of x into y and of u into z; see `rope_kernel`."""
    begin(HOPPER)
    token = tl.program_id(0).to(tl.int64)
    x_at, x_here = _places(x + token * x_token, x_heads, HALF, WIDTH, X_ROWS)
    u_at, u_here = _places(u + token * u_token, u_heads, HALF, WIDTH, U_ROWS)
    position = tl.load(positions + token)
    x1, x2 = tl.load(x_at, mask=x_here, other=0.0), tl.load(x_at + HALF, mask=x_here, other=0.0)
    u1, u2 = tl.load(u_at, mask=u_here, other=0.0), tl.load(u_at + HALF, mask=u_here, other=0.0)
    i = tl.arange(0, WIDTH)
    inside = (i < HALF) & (position >= 0) & (position < table)
    c = tl.load(cos + position * HALF + i, mask=inside, other=float("nan"))
    s = tl.load(sin + position * HALF + i, mask=inside, other=float("nan"))
    y_at, _ = _places(y + token * x_heads * (2 * HALF), x_heads, HALF, WIDTH, X_ROWS)
    z_at, _ = _places(z + token * u_heads * (2 * HALF), u_heads, HALF, WIDTH, U_ROWS)
    _store_rotated(y_at, x_here, x1, x2, c, s, HALF)
    _store_rotated(z_at, u_here, u1, u2, c, s, HALF)


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
    shape = {"HALF": dim // 2, "WIDTH": power_of_two(dim // 2), "enable_fp_fusion": False}
    arguments = (
        rotated[0], pair[0], rotated[-1], pair[-1], cos, sin, positions, heads[0], heads[-1], strides[0], strides[-1],
        cos.shape[0],
    )  # fmt: skip
    if not tokens or not all(heads) or not dim:
        pass
    elif len(pair) == 2 and tokens >= MANY and max(heads) <= ALL_HEADS:
        all_rows = {"X_ROWS": power_of_two(heads[0]), "U_ROWS": power_of_two(heads[1])}
        rope_pair_kernel[(tokens,)](*arguments, **all_rows, **shape, num_warps=4, **HOPPER)
    else:
        rows, warps = _launch(tokens, len(pair))
        grid = (tokens, sum(cdiv(h, rows) for h in heads))
        how = HOPPER if len(pair) == 1 else PLAIN
        rope_kernel[grid](*arguments, ROWS=rows, INVERSE=inverse, **shape, num_warps=warps, **how)
    return rotated


def _launch(tokens: int, tensors: int) -> tuple[int, int]:
    """Heads a program, warps; by the shape alone."""
    if tensors == 2:
        return (8, 4) if tokens < MANY else (8, 2)
    return (16, 4) if tokens < MANY else (32, 4)


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
