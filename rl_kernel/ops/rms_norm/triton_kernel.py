"""RMSNorm on GPUs, with and without the residual sum, for hidden rows and for q/k heads, and its gradients.

n features a row; the sum of squares is the contract's lane_dot: 128 lanes, each ascending by fma, then the tree.
"""

import torch
import triton
import triton.language as tl

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import BF16, F32, cdiv, require, require_rows
from rl_kernel.ops.rms_norm import gluon_kernel
from rl_kernel.ops.triton_hopper import HOPPER, PLAIN, begin, held
from rl_kernel.ops.triton_scalar import canonical, narrow, round_bf16, tree

LANES = tl.constexpr(128)
UNROLL = 4  # chunks whose loads are in flight together
HELD = 40  # chunks that fit into the registers of one warp
FEW = 264  # rows: two for every multiprocessor
# From how many rows on: warps of a row in registers, and chunks whose gains are loaded at a time. Measured on an H200.
SOME_WARPS, SOME_GAINS = 1, 16
MANY, MANY_WARPS, MANY_GAINS = 4096, 1, 16


@triton.jit
def _rstd(lanes, n, eps):  # type: ignore[no-untyped-def]
    total = tree(lanes, 7)
    mean = tl.div_rn(total, tl.zeros_like(total) + n * 1.0)
    return tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def rms_norm_kernel(
    y, new_residual, x, residual, w, rows, inner, stride, n, eps,
    CHUNKS: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr,
    HOPPER: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program normalises ROWS rows of n <= 128*CHUNKS features, which the L1 keeps between the two passes.

    Row i of x starts at (i // inner) * stride + (i % inner) * n; everything else is contiguous.
    """
    begin(HOPPER)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    at = row.to(tl.int64)[:, None] * n + lane[None, :]
    x_at = ((row // inner).to(tl.int64) * stride + (row % inner) * n)[:, None] + lane[None, :]
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for c in tl.range(0, CHUNKS, loop_unroll_factor=UNROLL):
        here = (row[:, None] < rows) & (EVEN | (c * LANES + lane[None, :] < n))
        value = tl.load(x + x_at + c * LANES, mask=here, other=0.0).to(tl.float32)
        if RESIDUAL:
            value += tl.load(residual + at + c * LANES, mask=here, other=0.0).to(tl.float32)
            rounded = narrow(value)
            tl.store(new_residual + at + c * LANES, rounded, mask=here)
            value = rounded.to(tl.float32)
        # An absent feature adds +0·+0 to a lane that is never -0: no bit changes.
        lanes = tl.fma(value, value, lanes)
    if RESIDUAL:
        tl.debug_barrier()  # the second pass reads what other threads of this program may have written
    r = _rstd(lanes, n, eps)[:, None]
    for c in tl.range(0, CHUNKS, loop_unroll_factor=UNROLL):
        here = (row[:, None] < rows) & (EVEN | (c * LANES + lane[None, :] < n))
        source = new_residual + at if RESIDUAL else x + x_at
        value = tl.load(source + c * LANES, mask=here, other=0.0).to(tl.float32)
        gain = tl.load(w + c * LANES + lane, mask=EVEN | (c * LANES + lane < n), other=0.0).to(tl.float32)[None, :]
        tl.store(y + at + c * LANES, narrow(round_bf16(value * r) * gain), mask=here)


@triton.jit
def _gains(w, lane, n, FIRST: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gains of the chunks FIRST to FIRST + COUNT - 1, all loads in flight together."""
    gains = ()
    for c in tl.static_range(FIRST, FIRST + COUNT):
        gains = gains + (tl.load(w + c * LANES + lane, mask=EVEN | (c * LANES + lane < n), other=0.0),)
    return gains


@triton.jit
def rms_norm_held_kernel(
    y, new_residual, x, residual, w, rows, inner, stride, n, eps,
    CHUNKS: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, GAINS: tl.constexpr,
    HOPPER: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """As rms_norm_kernel, for rows short enough to stay in registers: read once, all loads in flight together.

    GAINS: chunks whose gains are loaded at a time, since no load may move before a store: as many as the row has, and
    they travel with the row; fewer leave registers to more rows.
    """
    begin(HOPPER)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    at = row.to(tl.int64)[:, None] * n + lane[None, :]
    x_at = ((row // inner).to(tl.int64) * stride + (row % inner) * n)[:, None] + lane[None, :]
    values, others = (), ()
    for c in tl.static_range(CHUNKS):
        here = (row[:, None] < rows) & (EVEN | (c * LANES + lane[None, :] < n))
        values = values + (tl.load(x + x_at + c * LANES, mask=here, other=0.0),)
        if RESIDUAL:
            others = others + (tl.load(residual + at + c * LANES, mask=here, other=0.0),)
    gains = ()
    if GAINS >= CHUNKS:
        gains = _gains(w, lane, n, 0, CHUNKS, EVEN)
    if RESIDUAL:
        sums = ()
        for c in tl.static_range(CHUNKS):
            sums = sums + (held(narrow(values[c].to(tl.float32) + others[c].to(tl.float32)), HOPPER),)
        values = sums
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for c in tl.static_range(CHUNKS):
        value = values[c].to(tl.float32)  # type: ignore[var-annotated]
        lanes = tl.fma(value, value, lanes)
        if RESIDUAL:  # after all loads, since none may move before a store
            here = (row[:, None] < rows) & (EVEN | (c * LANES + lane[None, :] < n))
            tl.store(new_residual + at + c * LANES, values[c], mask=here)
    r = _rstd(lanes, n, eps)[:, None]
    again = ()
    for c in tl.static_range(CHUNKS):
        again = again + (held(values[c], HOPPER),)
    for c in tl.static_range(CHUNKS):
        if GAINS < CHUNKS and c % GAINS == 0:
            gains = _gains(w, lane, n, c, min(GAINS, CHUNKS - c), EVEN)
        here = (row[:, None] < rows) & (EVEN | (c * LANES + lane[None, :] < n))
        gain = gains[c % GAINS].to(tl.float32)[None, :]  # type: ignore[var-annotated]
        tl.store(y + at + c * LANES, narrow(round_bf16(again[c].to(tl.float32) * r) * gain), mask=here)


@triton.jit
def rms_norm_dx_kernel(
    dx, rstd, dy, x, w, rows, inner, dy_stride, x_stride, n, eps,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """dx, and 1/rms of every row for the dw kernel."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    at = row.to(tl.int64)[:, None] * n + lane[None, :]
    outer, offset = (row // inner).to(tl.int64), ((row % inner) * n)[:, None] + lane[None, :]
    x_at, dy_at = (outer * x_stride)[:, None] + offset, (outer * dy_stride)[:, None] + offset
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for c in tl.range(0, CHUNKS, loop_unroll_factor=UNROLL):
        here = (row[:, None] < rows) & (EVEN | (c * LANES + lane[None, :] < n))
        value = tl.load(x + x_at + c * LANES, mask=here, other=0.0).to(tl.float32)
        lanes = tl.fma(value, value, lanes)
    r = _rstd(lanes, n, eps)
    tl.store(rstd + row, r, mask=row < rows)
    r = r[:, None]
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for c in tl.range(0, CHUNKS, loop_unroll_factor=UNROLL):
        here = (row[:, None] < rows) & (EVEN | (c * LANES + lane[None, :] < n))
        t = tl.load(x + x_at + c * LANES, mask=here, other=0.0).to(tl.float32) * r
        gain = tl.load(w + c * LANES + lane, mask=EVEN | (c * LANES + lane < n), other=0.0).to(tl.float32)[None, :]
        g = tl.load(dy + dy_at + c * LANES, mask=here, other=0.0).to(tl.float32) * gain
        # Only here can a lane hold -0, so an absent feature must leave it alone.
        lanes = tl.where(here, tl.fma(g, t, lanes), lanes)
    total = tree(lanes, 7)
    c_row = tl.div_rn(total, tl.zeros_like(total) + n * 1.0)[:, None]
    for c in tl.range(0, CHUNKS, loop_unroll_factor=UNROLL):
        here = (row[:, None] < rows) & (EVEN | (c * LANES + lane[None, :] < n))
        t = tl.load(x + x_at + c * LANES, mask=here, other=0.0).to(tl.float32) * r
        gain = tl.load(w + c * LANES + lane, mask=EVEN | (c * LANES + lane < n), other=0.0).to(tl.float32)[None, :]
        g = tl.load(dy + dy_at + c * LANES, mask=here, other=0.0).to(tl.float32) * gain
        value = r * tl.fma(t * -1.0, c_row + tl.zeros_like(t), g)  # Triton's -t is 0 - t, which loses the sign of zero
        tl.store(dx + at + c * LANES, narrow(value), mask=here)


@triton.jit
def rms_norm_dw_kernel(
    dw, rstd, dy, x, tokens, groups, dy_stride, x_stride, n, COLUMNS: tl.constexpr, UNROLL: tl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """COLUMNS of the [groups*n] gains of all groups; each chain runs over the tokens in order, from what dw holds."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < groups * n
    group = column // n
    total = tl.load(dw + column, mask=here, other=0.0)
    for token in tl.range(0, tokens, loop_unroll_factor=UNROLL):
        r = tl.load(rstd + token * groups + group, mask=here, other=0.0)
        t = round_bf16(tl.load(x + token.to(tl.int64) * x_stride + column, mask=here, other=0.0).to(tl.float32) * r)
        d = tl.load(dy + token.to(tl.int64) * dy_stride + column, mask=here, other=0.0).to(tl.float32)
        total = tl.fma(d, t, total)
    tl.store(dw + column, canonical(total), mask=here)


def _launch(rows: int, n: int) -> tuple[int, int, int, int]:
    """Chunks of 128 features, rows a program, warps, chunks whose gains are loaded at a time; by the shape alone."""
    chunks = cdiv(n, 128)
    if rows <= FEW:
        return chunks, 1, 4 if chunks > 8 else 1, chunks
    if chunks <= 8:
        return (1, 8, 2, 1) if chunks == 1 else (chunks, 1, 1, chunks)
    return (chunks, 1, SOME_WARPS, SOME_GAINS) if rows < MANY else (chunks, 1, MANY_WARPS, MANY_GAINS)


def _normalise(
    y: torch.Tensor, new_residual: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor,
    rows: int, inner: int, stride: int, eps: float, *, add: bool,
) -> None:  # fmt: skip
    n = w.shape[0]
    if gluon_kernel.serves(n):
        gluon_kernel.normalise(y, new_residual, x, residual, w, rows, inner, stride, eps, add=add)
        return
    if not add and gluon_kernel.serves_heads(rows, n):
        gluon_kernel.normalise_heads(y, x, w, rows, inner, stride, eps)
        return
    chunks, per_program, warps, gains = _launch(rows, n)
    common = {"CHUNKS": chunks, "RESIDUAL": add, "ROWS": per_program, "EVEN": n % 128 == 0}
    common |= {"num_warps": warps, "enable_fp_fusion": False, **(PLAIN if per_program > 1 else HOPPER)}
    arguments = (y, new_residual, x, residual, w, rows, inner, stride, n, eps)
    if chunks <= HELD:
        rms_norm_held_kernel[(cdiv(rows, per_program),)](*arguments, GAINS=gains, **common)
    else:
        rms_norm_kernel[(cdiv(rows, per_program),)](*arguments, UNROLL=UNROLL, **common)


def _rows(op: str, name: str, x: torch.Tensor, w: torch.Tensor) -> tuple[int, int, int]:
    """Return (rows, rows that follow each other, elements from one such run to the next)."""
    require(op, "w", w, BF16, None)
    n = w.shape[0]
    if x.dim() == 0 or x.shape[-1] != n or n == 0:
        raise ShapeError(f"{op}: {name} has shape {list(x.shape)}; its last dimension must be w's {n}, at least 1")
    if x.is_contiguous() and x.dim() != 3:
        require(op, name, x, BF16, *x.shape)
        return x.numel() // n, 1, n
    return x.numel() // n, x.numel() // max(x.shape[0], 1) // n, require_rows(op, name, x, *x.shape)


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """x[…,n] bf16, w[n] bf16 → y[…,n] bf16, contiguous. The first dimension of x may lie apart."""
    rows, inner, stride = _rows("rms_norm", "x", x, w)
    if x.is_contiguous():
        inner, stride = 1, w.shape[0]  # no division for each row
    y = torch.empty(x.shape, dtype=BF16, device=x.device)
    if rows:
        _normalise(y, y, x, x, w, rows, inner, stride, eps, add=False)
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual[…,n], w[n], bf16 → (y, bf16(x + residual)), both […,n] bf16."""
    rows, _, _ = _rows("add_rms_norm", "x", x, w)
    require("add_rms_norm", "x", x, BF16, *x.shape)
    require("add_rms_norm", "residual", residual, BF16, *x.shape)
    y, total = torch.empty_like(x), torch.empty_like(x)
    if rows:
        _normalise(y, total, x, residual, w, rows, 1, w.shape[0], eps, add=True)
    return y, total


def rms_norm_backward(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float, dw: torch.Tensor) -> torch.Tensor:
    """dy, x[…,n], w[n] bf16, dw[G,n] fp32 → dx bf16; row r is added to dw[r % G], in place and in row order."""
    op = "rms_norm_backward"
    rows, inner, x_stride = _rows(op, "x", x, w)
    _, dy_inner, dy_stride = _rows(op, "dy", dy, w)
    n = w.shape[0]
    require(op, "dw", dw, F32, None, n)
    groups, shape = dw.shape[0], x.shape
    if dy.shape != x.shape or rows % groups:
        raise ShapeError(f"{op}: dy {list(dy.shape)}, x {list(x.shape)} and dw's {groups} groups do not fit")
    if not inner == dy_inner == groups:
        # Only a run of rows, one for each group, may lie apart from the next run.
        dy, x, inner, dy_stride, x_stride = dy.reshape(-1, n), x.reshape(-1, n), 1, n, n
    dx = torch.empty(shape, dtype=BF16, device=x.device)
    if not rows:
        return dx
    rstd = torch.empty(rows, dtype=F32, device=x.device)
    chunks = cdiv(n, 128)
    per_program = 4 if rows > FEW and chunks == 1 else 1
    warps = 4 if rows <= FEW and chunks > 8 else 1
    rms_norm_dx_kernel[(cdiv(rows, per_program),)](
        dx, rstd, dy, x, w, rows, inner, dy_stride, x_stride, n, eps,
        CHUNKS=chunks, ROWS=per_program, UNROLL=UNROLL, EVEN=n % 128 == 0, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    runs = groups // inner
    rms_norm_dw_kernel[(cdiv(groups * n, 32),)](
        dw, rstd, dy, x, rows // groups, groups, dy_stride * runs, x_stride * runs, n,
        COLUMNS=32, UNROLL=32, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return dx
