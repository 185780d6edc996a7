"""The tiles of the LM head merged in ascending order by one warp of each program, while the others still multiply.

A flag says that 64 tokens' statistics of 256 ids are there; a merging warp has 32 tokens, a lane each, and follows the
flags. What it still has to merge when the last product ends is what the last round of tiles left. Another warp raises
the flags: who raises one waits until memory has what was stored before, a fortieth of a tile's time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rl_kernel.ops.gluon_matmul import origin
from rl_kernel.ops.gluon_scalar import canonical, ln

TOKENS, COLUMN = gl.constexpr(32), gl.constexpr(4)  # of a job; tiles of a product's
BATCH, AHEAD = 8, 4  # tiles at a time, batches on their way
TURNS = gl.constexpr(2)  # tiles of a warpgroup whose flags may be still to raise
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
LOG2E = gl.constexpr(float.fromhex("0x1.715476p+0"))
NEG_INF = gl.constexpr(float("-inf"))
LOWEST = gl.constexpr(float.fromhex("-0x1.fffffep+127"))


@gluon.jit
def _raise(flag):  # type: ignore[no-untyped-def]
    """Add four once what this warp has been told of is in memory."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .u32 lane;
            .reg .pred first;
            mov.u32 lane, %laneid;
            setp.eq.u32 first, lane, 0;
            @first fence.acq_rel.gpu;
            @first red.relaxed.gpu.global.add.u32 [$1], 4;
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
def raise_flags(
    flags, done, free, tokens, width, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The warp that raises the flags [T/64,columns] for the warpgroups of its program; done and free: [BM/64 TURNS]."""
    for tile in range(gl.program_id(0), gl.cdiv(tokens, BM) * gl.cdiv(width, BN), gl.num_programs(0)):
        row, column = origin(tile, tokens, width, BM, BN, GROUP)
        turn = tile // gl.num_programs(0)
        for half in gl.static_range(BM // 64):
            slot = half * TURNS + turn % TURNS
            mbarrier.wait(done.index(slot), (turn // TURNS) & 1)
            _raise(flags + (row // 64 + half) * gl.cdiv(width, BN) + column // BN)
            mbarrier.arrive(free.index(slot))


@gluon.jit
def _seen(flag):  # type: ignore[no-untyped-def]
    """A flag a lane; what was written before they were raised can be read by every lane of the warp."""
    return gl.inline_asm_elementwise(
        """
        {
            ld.acquire.gpu.global.u32 $0, [$1];
            bar.warp.sync 0xffffffff;
        }
        """,
        "=r,l",
        [flag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _ready(flags, known, columns):  # type: ignore[no-untyped-def]
    """How many more columns than `known` are there. Raised, a flag is 4 mod 8; its two readers add two each."""
    lane = gl.arange(0, 32, LANES)
    flag = flags + gl.minimum(known + lane, columns - 1)
    behind = gl.where((_seen(flag) & 4) == 0, lane, 32)
    more = gl.minimum(gl.min(behind, 0), columns - known)
    two = gl.full((32,), 2, gl.int32, LANES)
    gl.atomic_add(flag, two, mask=lane < more, sem="relaxed", scope="gpu")
    return more


@gluon.jit
def _columns(x):  # type: ignore[no-untyped-def]
    """x[R,N] → its columns [R,1], as a tuple; no register moves."""
    if x.shape[1] == 1:
        return (x,)
    else:
        even, odd = x.reshape([x.shape[0], x.shape[1] // 2, 2]).split()
        evens, odds = _columns(even), _columns(odd)
        columns = ()
        for i in gl.static_range(len(evens)):
            columns = columns + (evens[i], odds[i])
        return columns


@gluon.jit
def _tiles(buffer, BATCH: gl.constexpr):  # type: ignore[no-untyped-def]
    """buffer[BATCH,32] → a tuple of tiles, a token a lane."""
    layout: gl.constexpr = gl.BlockedLayout([BATCH, 1], [1, 32], [1, 1], [1, 0])
    found, tiles = _columns(buffer.load(layout).permute((1, 0))), ()
    for i in gl.static_range(BATCH):
        tiles = tiles + (gl.convert_layout(found[i].reshape([32]), LANES, assert_trivial=True),)
    return tiles


@gluon.jit
def _fetch(
    m, s, flags, ring, known, step, steps, columns, BATCH: gl.constexpr, AHEAD: gl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The copies of a batch, once its columns are there, to its place in the ring → how many columns are."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    if step < steps:
        while known < gl.minimum((step + 1) * (BATCH // COLUMN), columns):
            known += _ready(flags, known, columns)
        at = gl.arange(0, BATCH, gl.SliceLayout(1, layout))[:, None] * TOKENS
        at = step * (BATCH * TOKENS) + at + gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
        slot = step % AHEAD
        async_copy.async_copy_global_to_shared(ring.index(2 * slot), m + at)
        async_copy.async_copy_global_to_shared(ring.index(2 * slot + 1), s + at)
    async_copy.commit_group()
    return known


@gluon.jit
def _terms(top, m, s):  # type: ignore[no-untyped-def]
    """What the sum is multiplied by, and what is added to it, tile by tile; and the maximum behind the last.

    Of the two factors of the contract one is 2^0.
    """
    higher, factors, addends = (), (), ()
    for t in gl.static_range(len(m)):
        higher = higher + (m[t] - top,)
        top = gl.maximum(top, m[t])
    for t in gl.static_range(len(m)):
        less = gl.exp2(gl.abs(higher[t]) * -LOG2E)
        factors = factors + (gl.where(higher[t] > 0.0, less, 1.0),)
        addends = addends + (s[t] * gl.where(higher[t] > 0.0, 1.0, less),)
    return top, factors, addends


@gluon.jit
def merge(
    arguments, BM: gl.constexpr, BN: gl.constexpr, CONTINUE: gl.constexpr, FINISH: gl.constexpr, BATCH: gl.constexpr,
    AHEAD: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The merging warp: m and s are [jobs, tiles, 32], whole batches; CONTINUE, FINISH as of `merge_kernel`.

    A maximum begins at the lowest number, so that no difference of two is NaN where both are -inf; a total of 0 says
    that nothing has counted yet.
    """
    (lse, logp, z_target, target, top_io, sum_io, m, s, flags, ring, tokens, width, vocab_start, vocab) = arguments
    columns = gl.cdiv(width, BN)
    steps = gl.cdiv(columns * COLUMN, BATCH)
    tiles = steps * BATCH
    lane = gl.arange(0, 32, LANES)
    for job in range(gl.program_id(0), gl.cdiv(tokens, BM) * (BM // TOKENS), gl.num_programs(0)):
        token = job * TOKENS + lane
        here = token < tokens
        top, total = gl.full((32,), LOWEST, gl.float32, LANES), gl.zeros((32,), gl.float32, LANES)
        if CONTINUE:
            top = gl.load(top_io + token, mask=here, other=0.0)
            total = gl.load(sum_io + token, mask=here, other=0.0)
        start = gl.cast(job, gl.int64) * (tiles * TOKENS)
        for tile in range(columns * COLUMN, tiles):
            gl.store(m + start + tile * TOKENS + lane, gl.full((32,), NEG_INF, gl.float32, LANES))
            gl.store(s + start + tile * TOKENS + lane, gl.zeros((32,), gl.float32, LANES))
        known, raised = 0, flags + (job // 2) * columns
        for step in range(AHEAD):
            known = _fetch(m + start, s + start, raised, ring, known, step, steps, columns, BATCH, AHEAD)
        for step in range(steps):
            async_copy.wait_group(AHEAD - 1)
            slot = step % AHEAD
            m2, s2 = _tiles(ring.index(2 * slot), BATCH), _tiles(ring.index(2 * slot + 1), BATCH)
            top, factors, addends = _terms(top, m2, s2)
            # Between terms and chain, so that the assembler does not compute the terms one after another.
            known = _fetch(m + start, s + start, raised, ring, known, step + AHEAD, steps, columns, BATCH, AHEAD)
            for t in gl.static_range(BATCH):
                total = total * factors[t] + addends[t]
        if FINISH:
            found = canonical(gl.where(total == 0.0, NEG_INF, top + ln(total)))
            gl.store(lse + token, found, mask=here)
            id = gl.load(target + token, mask=here, other=-1)
            inside = (id >= 0) & (id < vocab_start + vocab)
            z = gl.load(z_target + token, mask=inside, other=float("nan"), cache_modifier=".cg")
            gl.store(logp + token, canonical(z - found), mask=here)
        else:
            gl.store(top_io + token, top, mask=here)
            gl.store(sum_io + token, total, mask=here)
