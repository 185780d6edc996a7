"""Log-probabilities straight from hidden states on GPUs: no logit is ever stored.

T tokens, K features, V vocabulary rows of the weight (pads included), J ids a token. The vocabulary is walked in
stretches: each writes the statistics of its 64-id tiles, which are then merged in ascending order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rl_kernel.contracts.v1 import VOCAB_TILE
from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import EX2, F32, I64, PackedWeight, cdiv, held, power_of_two, require, require_rows
from rl_kernel.ops.linear_logp import gluon_kernel
from rl_kernel.ops.linear_logp.triton_backward import launch_for, linear_logp_backward
from rl_kernel.ops.triton_scalar import LOG2E, NEG_INF, canonical, exp2, ln, tree

__all__ = [
    "linear_logp",
    "linear_logp_backward",
    "linear_vocab_stats",
    "logp_from_logits",
    "merge_vocab_stats",
    "vocab_stats",
]

TILE = tl.constexpr(VOCAB_TILE)
STATS = 1 << 25  # pairs of tile statistics held at once: 8 bytes for a token and 64 ids, 256 MiB at most
FEW = 512  # tokens up to which a merge is bound by its chain, not by memory


@triton.jit
def tile_stats(z, real, EX2: tl.constexpr):  # type: ignore[no-untyped-def]
    """z[R,64], one tile a row → its maximum and its tree of exponentials; ids that are not real never count."""
    top = tl.max(tl.where(real, z, NEG_INF), 1)
    shift = tl.where(top == NEG_INF, 0.0, top)
    terms = tl.where(real, exp2((z - shift[:, None]) * LOG2E, EX2), 0.0)
    return top, tree(terms, 6)


@triton.jit(do_not_specialize=["tokens"])
def linear_stats_kernel(
    m, s, z_target, h, w, target, temperature, tokens, h_stride, vocab_start, vocab, k, first, last, tiles,
    token_stride, tile_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, HEATED: tl.constexpr,
    EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """BM tokens against the BN rows of w from `first` on: logits in registers, the statistics of their tiles to memory.

    vocab: rows of w that count; target minus vocab_start is a row of w.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    id = first + tl.program_id(1) * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    h_at = h + tl.where(row < tokens, row, 0).to(tl.int64)[:, None] * h_stride + i[None, :]
    w_at = w + tl.where(id < last, id, 0).to(tl.int64)[None, :] * k + i[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(k, BK)):
        if EVEN:
            left = tl.load(h_at, mask=(row < tokens)[:, None], other=0.0)
            right = tl.load(w_at)
        else:
            left = tl.load(h_at, mask=(row < tokens)[:, None] & (i < k - step * BK)[None, :], other=0.0)
            right = tl.load(w_at, mask=(i < k - step * BK)[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
        h_at += BK
        w_at += BK
    z = tl.div_rn(acc, tl.zeros_like(acc) + temperature) if HEATED else acc
    wanted = tl.load(target + row, mask=row < tokens, other=-1) - vocab_start
    hit = (id[None, :] == wanted[:, None]) & ((id < last) & (id < vocab))[None, :] & (row < tokens)[:, None]
    at = row.to(tl.int64)[:, None] + tl.zeros((BM, BN), tl.int64)
    tl.store(z_target + at, z, mask=hit)
    folded = tl.reshape(z, (BM * (BN // TILE), TILE))
    real = tl.reshape(tl.broadcast_to((id < vocab)[None, :], (BM, BN)), (BM * (BN // TILE), TILE))
    top, total = tile_stats(folded, real, EX2)
    piece = tl.arange(0, BM * (BN // TILE))
    token = tl.program_id(0) * BM + piece // (BN // TILE)
    tile = tl.program_id(1) * (BN // TILE) + piece % (BN // TILE)
    here = (token < tokens) & (tile < tiles)
    out = tile.to(tl.int64) * tile_stride + token.to(tl.int64) * token_stride
    tl.store(m + out, canonical(top), mask=here)
    tl.store(s + out, canonical(total), mask=here)


@triton.jit
def _store_logp(logp, z_target, target, vocab, token, lse, here):  # type: ignore[no-untyped-def]
    """z_target - lse; NaN where the target is not in [0, vocab) and nobody has stored its logit."""
    id = tl.load(target + token, mask=here, other=-1)
    z = tl.load(z_target + token, mask=(id >= 0) & (id < vocab), other=float("nan"))
    tl.store(logp + token, canonical(z - lse), mask=here)


@triton.jit
def merge_kernel(
    top_io, sum_io, lse, logp, z_target, target, vocab, m, s, tokens, tiles, tile_stride, token_stride,
    BLOCK: tl.constexpr, CONTINUE: tl.constexpr, FINISH: tl.constexpr, LOGP: tl.constexpr, UNROLL: tl.constexpr,
    EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """BLOCK tokens merge their tiles in ascending order, from what the stretch before left behind (CONTINUE).

    FINISH: to lse, and with LOGP to logp = z_target - lse; else to top_io and sum_io.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = token < tokens
    at = token.to(tl.int64) * token_stride
    if CONTINUE:
        top = tl.load(top_io + token, mask=here, other=0.0)
        total = tl.load(sum_io + token, mask=here, other=0.0)
    else:
        top = tl.load(m + at, mask=here, other=0.0)
        total = tl.load(s + at, mask=here, other=0.0)
    begin: tl.constexpr = 0 if CONTINUE else 1
    for tile in tl.range(begin, tiles, loop_unroll_factor=UNROLL):
        m2 = tl.load(m + at + tile.to(tl.int64) * tile_stride, mask=here, other=0.0)
        s2 = tl.load(s + at + tile.to(tl.int64) * tile_stride, mask=here, other=0.0)
        after = tl.maximum(top, m2)
        shift = tl.where(after == NEG_INF, 0.0, after)
        a, b = exp2((top - shift) * LOG2E, EX2), exp2((m2 - shift) * LOG2E, EX2)
        total = total * a + s2 * b
        top = after
    if FINISH:
        found = canonical(top + ln(total))
        tl.store(lse + token, found, mask=here)
        if LOGP:
            _store_logp(logp, z_target, target, vocab, token, found, here)
    else:
        tl.store(top_io + token, top, mask=here)
        tl.store(sum_io + token, total, mask=here)


@triton.jit
def merge_few_kernel(
    lse, logp, z_target, target, vocab, m, s, spare, tiles, tile_stride, token_stride,
    LOGP: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr, EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program merges all tiles of one token, with the bits of `merge_kernel` and a shorter chain.

    The running maximum has no order, so what each step multiplies and adds is known beforehand; only those two
    operations stay in sequence. spare: [T,2,WIDTH] fp32.
    """
    token = tl.program_id(0)
    tile = tl.arange(0, WIDTH)
    at = tile.to(tl.int64) * tile_stride + token * token_stride
    here = tile < tiles
    m2 = tl.load(m + at, mask=here, other=NEG_INF)
    s2 = tl.load(s + at, mask=here, other=0.0)
    before = tl.load(m + at - tile_stride, mask=here & (tile > 0), other=NEG_INF)
    top = tl.associative_scan(before, 0, _maximum)
    after = tl.maximum(top, m2)
    shift = tl.where(after == NEG_INF, 0.0, after)
    factors = spare + token * 2 * WIDTH
    tl.store(factors + tile, exp2((top - shift) * LOG2E, EX2))
    tl.store(factors + WIDTH + tile, s2 * exp2((m2 - shift) * LOG2E, EX2))
    tl.debug_barrier()
    total = 0.0
    for step in tl.range(0, tiles, loop_unroll_factor=UNROLL):
        total = total * tl.load(factors + step) + tl.load(factors + WIDTH + step)
    found = canonical(ln(tl.zeros((1,), tl.float32) + total) + tl.max(m2, 0))
    at = token + tl.zeros((1,), tl.int32)
    tl.store(lse + at, found)
    if LOGP:
        _store_logp(logp, z_target, target, vocab, at, found, at >= 0)


@triton.jit
def _maximum(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit
def vocab_stats_kernel(
    m, s, logits, temperature, width, vocab_start, vocab, tiles, ROWS: tl.constexpr, EX2: tl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """ROWS tiles of one token's stored logits."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    real = (j < width) & (vocab_start + j < vocab)
    z = tl.load(logits + token * width + j, mask=real, other=0.0)
    z = tl.div_rn(z, tl.load(temperature + token) + tl.zeros_like(z))
    top, total = tile_stats(z, real, EX2)
    tl.store(m + token * tiles + tile, canonical(top), mask=tile < tiles)
    tl.store(s + token * tiles + tile, canonical(total), mask=tile < tiles)


@triton.jit
def gather_logp_kernel(
    logp, logits, ids, temperature, lse, columns, width, vocab, BLOCK: tl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """logp of BLOCK of one token's ids. An id outside the vocabulary gives NaN."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + token * columns + j, mask=j < columns, other=0)
    x = tl.load(logits + token * width + id, mask=(id >= 0) & (id < vocab), other=float("nan"))
    z = tl.div_rn(x, tl.load(temperature + token) + tl.zeros_like(x))
    tl.store(logp + token * columns + j, canonical(z - tl.load(lse + token)), mask=j < columns)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a token's logp is made from: the targets' logits z[T], target[T]; and where it goes."""

    logp: torch.Tensor
    z: torch.Tensor
    target: torch.Tensor
    vocab: int


def _merge(m: torch.Tensor, s: torch.Tensor, lse: torch.Tensor, running: Sequence[torch.Tensor],
           wanted: Wanted | None = None, *, tile_major: bool, keep: bool, finish: bool) -> None:  # fmt: skip
    tokens, tiles = (m.shape[1], m.shape[0]) if tile_major else m.shape
    strides = (tokens, 1) if tile_major else (1, tiles)
    head = (wanted.logp, wanted.z, wanted.target, wanted.vocab) if wanted is not None else (lse, lse, lse, 0)
    if tokens <= FEW and tiles <= 8192 and finish and not keep:
        width = power_of_two(tiles)
        spare = torch.empty((tokens, 2, width), dtype=F32, device=m.device)
        merge_few_kernel[(tokens,)](
            lse, *head, m, s, spare, tiles, *strides,
            LOGP=wanted is not None, WIDTH=width, UNROLL=64, EX2=EX2, num_warps=8 if width >= 1024 else 1,
            enable_fp_fusion=False,
        )  # fmt: skip
        return
    block = 32 if tokens >= 32 else 1
    merge_kernel[(cdiv(tokens, block),)](
        *running, lse, *head, m, s, tokens, tiles, *strides,
        BLOCK=block, CONTINUE=keep, FINISH=finish, LOGP=wanted is not None, UNROLL=16, EX2=EX2, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip


def _head(
    op: str, h: torch.Tensor, w: torch.Tensor | PackedWeight, target: torch.Tensor, temperature: float, start: int
) -> tuple[torch.Tensor, int]:
    """Return (the weight, elements from one row of h to the next); ShapeError where the arguments do not fit."""
    weight = held(op, w)
    stride = require_rows(op, "h", h, None, weight.shape[1])
    require(op, "target", target, I64, h.shape[0])
    if not temperature > 0:
        raise ShapeError(f"{op}: temperature is {temperature}; it must be positive")
    _check_start(op, start)
    return weight, stride


def _stats(
    m: torch.Tensor, s: torch.Tensor, z: torch.Tensor, h: torch.Tensor, h_stride: int, w: torch.Tensor,
    target: torch.Tensor, temperature: float, vocab_start: int, vocab: int, first: int, last: int, token_major: bool,
) -> None:  # fmt: skip
    """Statistics of the rows first .. last of w into m and s, [T,tiles] if token_major, [tiles,T] if not."""
    (tokens, k), tiles = h.shape, cdiv(last - first, VOCAB_TILE)
    strides = (tiles, 1) if token_major else (1, tokens)
    if EX2 and tokens > 64 and gluon_kernel.serves(h, h_stride, w):
        gluon_kernel.linear_stats(
            m,
            s,
            z,
            h,
            h_stride,
            w[first:last],
            target,
            temperature,
            vocab_start + first,
            vocab - vocab_start - first,
            strides,
        )
        return
    bm, bn, bk, warps, stages = launch_for(tokens)
    linear_stats_kernel[(cdiv(tokens, bm), cdiv(last - first, bn))](
        m, s, z, h, w, target, temperature, tokens, h_stride, vocab_start, vocab - vocab_start, k, first, last, tiles,
        *strides,
        BM=bm, BN=bn, BK=bk, EVEN=k % bk == 0, HEATED=temperature != 1.0, EX2=EX2,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip


def linear_logp(
    h: torch.Tensor, w: torch.Tensor | PackedWeight, target: torch.Tensor, *, temperature: float, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """h[T,K], w[V,K] bf16, target[T] int64 → logp[T], lse[T] fp32. ids in [vocab, V) are pads.

    A target outside [0, vocab) gives NaN: nothing on the GPU can raise. Memory: 8 bytes for a token and 64 ids, 256 MiB
    at most up to 2^20 tokens (STATS); larger vocabularies go a stretch at a time. No logit is stored.
    """
    weight, h_stride = _head("linear_logp", h, w, target, temperature, 0)
    rows, tokens = weight.shape[0], h.shape[0]
    if not 0 < vocab <= rows:
        raise ShapeError(f"linear_logp: vocab {vocab}; w has {rows} rows, so 1 to {rows} would work")
    rows_of_16_bytes = torch.empty((5, cdiv(tokens, 4) * 4), dtype=F32, device=h.device)
    logp, lse, z, *running = rows_of_16_bytes[:, :tokens]
    if not tokens:
        return logp, lse
    wanted = Wanted(logp, z, target, vocab)
    fused = EX2 and tokens >= gluon_kernel.FEWEST and gluon_kernel.serves(h, h_stride, weight)
    stretch = max(32, STATS // tokens // 32 * 32) * VOCAB_TILE
    for first in range(0, rows, stretch):
        last = min(rows, first + stretch)
        when = {"keep": first > 0, "finish": last == rows}
        if fused:
            merge = gluon_kernel.Merge(lse, logp, (running[0], running[1]), **when)
            part = weight[first:last]
            gluon_kernel.linear_merged(merge, z, h, h_stride, part, target, temperature, first, vocab - first)
            continue
        m, s = torch.empty((2, cdiv(last - first, VOCAB_TILE), tokens), dtype=F32, device=h.device)
        _stats(m, s, z, h, h_stride, weight, target, temperature, 0, vocab, first, last, False)
        _merge(m, s, lse, running, wanted, tile_major=True, **when)
        del m, s  # else the next stretch's would lie beside them
    return logp, lse


def linear_vocab_stats(
    h: torch.Tensor, w: torch.Tensor | PackedWeight, target: torch.Tensor,
    *, temperature: float, vocab_start: int, vocab: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The share of one vocabulary shard w[Vshard,K], which owns the ids from vocab_start on.

    Returns fp32 (m[T,tiles], s[T,tiles], z[T]): maxima and sums of its tiles, and the target's logit / temperature,
    -inf where another shard owns the target. logp = z - merge_vocab_stats(all shards' m and s side by side).
    """
    weight, h_stride = _head("linear_logp", h, w, target, temperature, vocab_start)
    tokens, rows = h.shape[0], weight.shape[0]
    m, s = torch.empty((2, tokens, cdiv(rows, VOCAB_TILE)), dtype=F32, device=h.device)
    z = torch.full((tokens,), float("-inf"), device=h.device)
    if m.numel():
        _stats(m, s, z, h, h_stride, weight, target, temperature, vocab_start, vocab, 0, rows, True)
    return m, s, z


def vocab_stats(
    logits: torch.Tensor, temperature: torch.Tensor, *, vocab_start: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits[T,Vshard], temperature[T] fp32 → per tile the maximum m[T,tiles] and the sum s[T,tiles]."""
    require("vocab_stats", "logits", logits, F32, None, None)
    tokens, width = logits.shape
    require("vocab_stats", "temperature", temperature, F32, tokens)
    _check_start("vocab_stats", vocab_start)
    tiles = cdiv(width, VOCAB_TILE)
    m, s = torch.empty((2, tokens, tiles), dtype=F32, device=logits.device)
    if m.numel():
        vocab_stats_kernel[(tokens, cdiv(tiles, 16))](
            m, s, logits, temperature, width, vocab_start, vocab, tiles,
            ROWS=16, EX2=EX2, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return m, s


def _check_start(op: str, start: int) -> None:
    if start % VOCAB_TILE:
        nearest = start // VOCAB_TILE * VOCAB_TILE
        raise ShapeError(f"{op}: vocab_start {start}; a shard owns whole tiles of {VOCAB_TILE}, nearest {nearest}")


def merge_vocab_stats(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Tiles of all shards in global order, m and s[T,tiles] fp32 → lse[T] fp32."""
    require("merge_vocab_stats", "m", m, F32, None, None)
    require("merge_vocab_stats", "s", s, F32, *m.shape)
    if not m.shape[1]:
        raise ShapeError("merge_vocab_stats: no tile to merge; a vocabulary has at least one")
    lse = torch.empty(m.shape[0], dtype=F32, device=m.device)
    if lse.numel():
        _merge(m, s, lse, (lse, lse), tile_major=False, keep=False, finish=True)
    return lse


def logp_from_logits(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, *, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits[T,V] fp32, ids[T,J] int64 (outside [0, vocab): NaN), temperature[T] fp32 → logp[T,J], lse[T] fp32."""
    m, s = vocab_stats(logits, temperature, vocab_start=0, vocab=vocab)
    require("logp_from_logits", "ids", ids, I64, logits.shape[0], None)
    lse = merge_vocab_stats(m, s)
    logp = torch.empty(ids.shape, dtype=F32, device=logits.device)
    if logp.numel():
        gather_logp_kernel[(ids.shape[0], cdiv(ids.shape[1], 128))](
            logp, logits, ids, temperature, lse, ids.shape[1], logits.shape[1], vocab,
            BLOCK=128, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return logp, lse
