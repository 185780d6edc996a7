"""The tree over ranks through memory that the GPUs of one host map from each other: ranks push, nobody reads a peer.

Each rank owns one block of memory, laid out as `symmetric.Layout` says; `bases[R]` holds the addresses of all of them.
Two kernels with the same bits, both in one launch and without a barrier over the device. All that must change from one
call to the next is counted in device memory, so a CUDA graph replays them as they are. R ranks, n values.
"""

import triton
import triton.language as tl

from rl_kernel.ops.triton_scalar import stored, tree_of

SLOTS = tl.constexpr(4)  # chunks of one program that may be under way


@triton.jit
def _region(bases, rank, OFFSET: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a region of a rank's memory starts."""
    address = tl.load(bases + rank) + OFFSET
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _announce(flag, value):  # type: ignore[no-untyped-def]
    """Publish `value` after everything that this program wrote; needs a barrier before it."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .u32 thread;
            .reg .pred first;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.u32 [$1], $2;
            mov.u32 $0, $2;
        }
        """,
        "=r,l,r",
        [flag, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _wait(flag, value):  # type: ignore[no-untyped-def]
    """Every thread: until `flag` has reached `value`; what was written before it was announced can be read then."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .u32 seen;
            .reg .s32 ahead;
            .reg .pred behind;
        again:
            ld.acquire.sys.global.u32 seen, [$1];
            sub.s32 ahead, seen, $2;
            setp.lt.s32 behind, ahead, 0;
            @behind bra again;
            mov.u32 $0, seen;
        }
        """,
        "=r,l,r",
        [flag, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rank"])
def one_shot_kernel(
    y, partial, bases, counts, n, rank, RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    FP32: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Few values: every rank sends its partial to all, each value in one word with the number of the call.

    A word is written whole, so its number says that its value is there: no flag, no fence, half of the wire.
    Calls alternate between two sets of words: who writes a set again has heard from every rank since it was read.
    """
    program = tl.program_id(0)
    i = program * BLOCK + tl.arange(0, BLOCK)
    here = i < n
    call = tl.load(counts + program) + 1
    number = call.to(tl.int64) << 32
    words = (call & 1) * (RANKS * CAPACITY)
    mine = tl.load(partial + i, mask=here, other=0.0)
    word = (mine.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | number
    for d in tl.static_range(1, RANKS):
        at = _region(bases, (rank + d) % RANKS, 0, tl.int64) + words + rank * CAPACITY
        tl.store(at + i, word, mask=here)
    own = _region(bases, rank, 0, tl.int64) + words
    tl.store(own + rank * CAPACITY + i, word, mask=here)
    values = ()
    for r in tl.static_range(RANKS):
        at = own + r * CAPACITY + i
        word = tl.load(at, mask=here, other=number, volatile=True)
        while tl.max(((word >> 32).to(tl.int32) != call).to(tl.int32), 0) != 0:
            word = tl.load(at, mask=here, other=number, volatile=True)
        values = values + (word.to(tl.int32).to(tl.float32, bitcast=True),)
    tl.store(y + i, stored(tree_of(values), FP32), mask=here)
    tl.store(counts + program, call)


@triton.jit(do_not_specialize=["rank", "rounds"])
def two_shot_kernel(
    y, partial, bases, counts, n, part, rounds, rank,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr, RESULTS: tl.constexpr, FLAGS: tl.constexpr,
    FP32: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Many values: rank r adds up the values [r*part, (r+1)*part) and sends the sums to all, a chunk at a time.

    In turn t a program pushes chunk t of its partials, adds up and pushes chunk t-1, and keeps the sums t-2 of its
    peers; one flag a peer says that a turn is over. A slot is written again three turns later, when its reader has
    announced a turn past it. A program talks to the same program of its peers only, so all must be on the device.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    base = tl.load(counts + program)
    first = program * (SLOTS * RANKS)  # a program's slots: [SLOTS, RANKS, BLOCK]
    sums = _region(bases, rank, SUMS, tl.float32)
    results = _region(bases, rank, RESULTS, y.dtype.element_ty)
    for turn in range(rounds + 2):
        if turn < rounds:
            j = (turn * programs + program).to(tl.int64) * BLOCK + lane
            slot = (first + (turn % SLOTS) * RANKS + rank) * BLOCK
            for d in tl.static_range(1, RANKS):
                peer = (rank + d) % RANKS
                i = peer.to(tl.int64) * part + j
                value = tl.load(partial + i, mask=(j < part) & (i < n), other=0.0)
                tl.store(_region(bases, peer, SUMS, tl.float32) + slot + lane, value)
        if turn > 0:
            for d in tl.static_range(1, RANKS):
                flag = _region(bases, rank, FLAGS, tl.int32) + program * RANKS + (rank + d) % RANKS
                _wait(flag, base + turn)
        if (turn > 0) & (turn <= rounds):
            j = ((turn - 1) * programs + program).to(tl.int64) * BLOCK + lane
            i = rank.to(tl.int64) * part + j
            here = (j < part) & (i < n)
            row = first + ((turn - 1) % SLOTS) * RANKS
            values = ()
            for r in tl.static_range(RANKS):
                if rank == r:
                    value = tl.load(partial + i, mask=here, other=0.0)
                else:
                    value = tl.load(sums + (row + r) * BLOCK + lane, cache_modifier=".cg")
                values = values + (value,)
            total = stored(tree_of(values), FP32)
            for d in tl.static_range(1, RANKS):
                target = _region(bases, (rank + d) % RANKS, RESULTS, y.dtype.element_ty)
                tl.store(target + (row + rank) * BLOCK + lane, total)
            tl.store(y + i, total, mask=here)
        if turn > 1:
            j = ((turn - 2) * programs + program).to(tl.int64) * BLOCK + lane
            row = first + ((turn - 2) % SLOTS) * RANKS
            for d in tl.static_range(1, RANKS):
                peer = (rank + d) % RANKS
                i = peer.to(tl.int64) * part + j
                total = tl.load(results + (row + peer) * BLOCK + lane, cache_modifier=".cg")
                tl.store(y + i, total, mask=(j < part) & (i < n))
        tl.debug_barrier()
        if turn <= rounds:
            for d in tl.static_range(1, RANKS):
                flag = _region(bases, (rank + d) % RANKS, FLAGS, tl.int32) + program * RANKS + rank
                _announce(flag, base + turn + 1)
    tl.store(counts + program, base + rounds + 1)
