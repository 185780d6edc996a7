"""Where programs that share a tile meet: sums move through the L2, the upper levels of the tree join the programs.

Also how a thread parks its registers of an accumulator in memory and takes them back, sixteen bytes at a time.
"""

from dataclasses import dataclass, field

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ARENA = 1 << 21  # counters a device has; eager streams take theirs once, every captured launch takes its own
MOST_COLUMNS = 1 << 17  # of those, for the flags of `columns`, of an eager stream


LINE = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # a warpgroup's 16-byte accesses, 2 KB each


@gluon.jit
def _line(x):  # type: ignore[no-untyped-def]
    """An accumulator [64,N] as a vector in the order of LINE; no register moves.

    Of a row: warp (4), half (2), lane / 4 (8); of a column: high (N/16), low (2), lane % 4 (4), one of a pair (2).
    """
    columns: gl.constexpr = x.shape[1]
    parts = x.reshape([4, 2, 8, columns // 16, 2, 4, 2]).permute((3, 1, 0, 2, 5, 4, 6))
    return gl.convert_layout(parts.reshape([64 * columns]), LINE, assert_trivial=True)


@gluon.jit
def _from_line(x, N: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    parts = x.reshape([N // 16, 2, 4, 8, 4, 2, 2]).permute((2, 1, 3, 0, 5, 4, 6))
    return gl.convert_layout(parts.reshape([64, N]), layout, assert_trivial=True)


@gluon.jit
def put(at, x):  # type: ignore[no-untyped-def]
    """Park the accumulator x[64,N] from `at` on."""
    line = _line(x)
    gl.store(at + gl.arange(0, line.shape[0], LINE), line, cache_modifier=".cg")


@gluon.jit
def take(at, x, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """What `put` parked from `at` on, plus the accumulator x[64,N]."""
    line = _line(x)
    parked = gl.load(at + gl.arange(0, line.shape[0], LINE), cache_modifier=".cg")
    return _from_line(parked + line, x.shape[1], layout)


@gluon.jit
def _count(flag):  # type: ignore[no-untyped-def]
    """Each of the four warps adds 1 once its own lanes are done with memory."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .u32 lane;
            .reg .pred first;
            mov.u32 lane, %laneid;
            setp.eq.u32 first, lane, 0;
            bar.warp.sync 0xffffffff;
            @first red.release.gpu.global.add.u32 [$1], 1;
            mov.u32 $0, lane;
        }
        """,
        "=r,l",
        [flag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_four(flag):  # type: ignore[no-untyped-def]
    """Every thread: until four have counted; the readers count too, and leave the flag at 0 mod 8."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .u32 seen;
            .reg .pred none;
        again:
            ld.acquire.gpu.global.u32 seen, [$1];
            and.b32 seen, seen, 4;
            setp.eq.u32 none, seen, 0;
            @none bra again;
            mov.u32 $0, seen;
        }
        """,
        "=r,l",
        [flag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _level(
    acc, parked, flags, N: gl.constexpr, layout: gl.constexpr, HALF: gl.constexpr, HALVES: gl.constexpr,
    SPLIT: gl.constexpr, BIT: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One level of the tree: a program hands its sum to its neighbour BIT away, or takes the neighbour's."""
    program = gl.program_id(0)
    role = (program % SPLIT) ^ (HALF * (SPLIT - 1))
    if role % BIT == 0:
        gives = role & BIT != 0
        giver = gl.where(gives, program, program ^ BIT)
        room = parked + (giver * HALVES + HALF).to(gl.int64) * (64 * N)
        flag = flags + giver * 2 + HALF
        if gives:
            put(room, acc)
        else:
            await_four(flag)
            acc = take(room, acc, layout)
        _count(flag)
    return acc


@gluon.jit
def join(
    acc, parked, flags, N: gl.constexpr, layout: gl.constexpr, HALF: gl.constexpr, HALVES: gl.constexpr,
    SPLIT: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """acc[64,N] of this program's piece → (the sum of the tile's SPLIT pieces, whether this program has it).

    Programs SPLIT k to SPLIT k + SPLIT - 1 share a tile; all are on the device. What one half of the rows hands over
    goes the other way than the other half's, so that two neighbours both have work.
    """
    if SPLIT > 1:
        acc = _level(acc, parked, flags, N, layout, HALF, HALVES, SPLIT, 1)
    if SPLIT > 2:
        acc = _level(acc, parked, flags, N, layout, HALF, HALVES, SPLIT, 2)
    if SPLIT > 4:
        acc = _level(acc, parked, flags, N, layout, HALF, HALVES, SPLIT, 4)
    return acc, gl.program_id(0) % SPLIT == HALF * (SPLIT - 1)


@dataclass(slots=True)
class _Arena:
    """Counters of one device and who has them: `shares` maps a stream and a purpose to its own."""

    counters: torch.Tensor
    used: int = 0
    shares: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)

    def share(self, count: int) -> torch.Tensor | None:
        """`count` counters that nobody else has; None when there are no more."""
        if self.used + count > len(self.counters):
            return None
        self.used += count
        return self.counters[self.used - count : self.used]


_arenas: dict[int, _Arena] = {}


def _counters(device: torch.device, purpose: str, count: int, most: int) -> torch.Tensor:
    """`count` counters for one launch: of the `most` that the current stream has for the purpose.

    A launch that is being captured gets some of its own, since a graph may run beside eager launches of any stream.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    capturing = torch.cuda.is_current_stream_capturing()
    if index not in _arenas and not capturing:
        _arenas[index] = _Arena(torch.zeros(ARENA, dtype=torch.int32, device=device))
        torch.cuda.synchronize(device)  # other streams find them cleared
    arena = _arenas.get(index)
    found = None
    if arena is not None and capturing:
        found = arena.share(count)
    elif arena is not None:
        key = torch.cuda.current_stream(device).cuda_stream, purpose
        if key not in arena.shares and (fresh := arena.share(most)) is not None:
            arena.shares[key] = fresh
        found = arena.shares.get(key)
    # Without any left, a launch clears its own: slower, and as right.
    return torch.zeros(count, dtype=torch.int32, device=device) if found is None else found


def flags(device: torch.device, programs: int, most: int) -> torch.Tensor:
    """Two counters a program for one launch of at most `most` programs, 0 mod 8, as the launch leaves them."""
    return _counters(device, "flags", 2 * programs, 2 * most)


def queue(device: torch.device) -> torch.Tensor:
    """One counter for one launch, 0, as the launch leaves it."""
    return _counters(device, "queue", 1, 1)


def columns(device: torch.device, count: int) -> torch.Tensor:
    """`count` counters for one launch, 0 mod 8, as the launch leaves them."""
    if count > MOST_COLUMNS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    return _counters(device, "columns", count, MOST_COLUMNS)
