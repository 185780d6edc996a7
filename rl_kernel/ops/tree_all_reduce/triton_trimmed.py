"""Two shots between two ranks with 22.5 of a partial's 32 bits on the wire, bf16 out; the bits of `two_shot_kernel`.

Sixteen values share an exponent, E, the largest of them. Of each travel its sign and 21 bits: as a float's would, three
of exponent (seven octaves from E down) and 18 of mantissa; below those octaves a multiple of the last octave's step. So
the owner of a value knows both ends, low and high, of what the peer's partial p can be: |low| <= |p| <= |high|, one
sign.

Why that is enough. Order the floats that are no NaN as numbers, -0 before +0. Then p -> own + p keeps that order: the
exact sums do, rounding to nearest does, and where the exact sum is 0 its sign is - only for (-0) + (-0), the least of
the sums that are 0. (own infinite: p is finite, so all sums are own. own NaN: all are the one NaN.) Rounding to bf16
keeps it too, the sign of what rounds to 0 included. So where own + low and own + high round to the same bits, all
between do, p's among them. Where they differ, or E is that of infinities and NaN, the value is open: its partial is
read whole from the peer's memory, a quad at a time, and added. A `high` past the largest float is +-inf, which only
widens the interval. Subnormals are not special: steps below 2^-126 are subnormal numbers, exact, never flushed.

Of normally distributed values one in 700 is open, and each costs the wire about 100 bytes. Four neighbouring values are
a quad, four quads a lane's sixteen: 11 words and a byte. n values.
"""

import triton
import triton.language as tl

from rl_kernel.ops.tree_all_reduce.triton_symmetric import SLOTS, _announce, _region, _wait
from rl_kernel.ops.triton_scalar import narrow

OCTAVES = tl.constexpr(7)  # with an exponent of their own


@triton.jit
def _quads(x):  # type: ignore[no-untyped-def]
    """The bits of x[L,4,4] → four of [L,4], one for each place in a quad."""
    even, odd = tl.split(tl.reshape(x.to(tl.int32, bitcast=True), (x.shape[0], 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _four(x):  # type: ignore[no-untyped-def]
    """x[L,4] → its columns."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _base(exponent):  # type: ignore[no-untyped-def]
    """The exponent below the octaves that have their own."""
    return tl.maximum(exponent, OCTAVES + 1) - OCTAVES


@triton.jit
def _code(x, base):  # type: ignore[no-untyped-def]
    """The sign and 21 bits of the magnitude, in one int of 22 bits, of the bits x of a finite fp32."""
    size = x & 0x7FFFFFFF
    exponent = size >> 23
    whole = (size & 0x7FFFFF) | (tl.minimum(exponent, 1) << 23)
    small = whole >> tl.minimum(base + 6 - tl.maximum(exponent, 1), 31)
    code = tl.where(exponent > base, (size - (base << 23)) >> 5, small)
    return code | ((x >> 10) & 0x200000)


@triton.jit
def _steps(count, step):  # type: ignore[no-untyped-def]
    """The bits of count * step, exact; count as a float is read off behind 2^23, where the steps are 1."""
    return (((count | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0) * step).to(tl.int32, bitcast=True)


@triton.jit
def _ends(code, base, step):  # type: ignore[no-untyped-def]
    """What `_code` leaves open: the value with the least magnitude that it may be of, and the one with the largest."""
    size = code & 0x1FFFFF
    sign = (code << 10) & -2147483648
    own_exponent = size >= 1 << 18
    low = (size << 5) + (base << 23)
    high = tl.where(own_exponent, low | 31, _steps(size + 1, step))
    low = tl.where(own_exponent, low, _steps(size, step))
    return (low | sign).to(tl.float32, bitcast=True), (high | sign).to(tl.float32, bitcast=True)


@triton.jit
def _step(base):  # type: ignore[no-untyped-def]
    """2^(base - 144), of what has no exponent of its own."""
    return tl.where(base > 17, (base - 17) << 23, 1 << tl.minimum(base + 5, 22)).to(tl.float32, bitcast=True)


@triton.jit
def _words(x):  # type: ignore[no-untyped-def]
    """The bits x, four quads a lane → two words a quad, three a lane, and the exponent."""
    a, b, c, d = x
    largest = tl.maximum(tl.maximum(a & 0x7FFFFFFF, b & 0x7FFFFFFF), tl.maximum(c & 0x7FFFFFFF, d & 0x7FFFFFFF))
    x0, x1, x2, x3 = _four(largest)
    exponent = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)) >> 23
    base = _base(exponent)[:, None]
    a, b, c, d = _code(a, base), _code(b, base), _code(c, base), _code(d, base)
    w0, w1 = ((a >> 6) << 16) | (b >> 6), ((c >> 6) << 16) | (d >> 6)
    x0, x1, x2, x3 = _four((a & 63) | ((b & 63) << 6) | ((c & 63) << 12) | ((d & 63) << 18))
    return w0, w1, x0 | (x3 << 24), x1 | ((x3 >> 8) << 24), x2 | ((x3 >> 16) << 24), exponent


@triton.jit
def _codes(w0, w1, t0, t1, t2):  # type: ignore[no-untyped-def]
    """The words that `_words` made → the four codes."""
    x3 = ((t0 >> 24) & 0xFF) | ((t1 >> 16) & 0xFF00) | ((t2 >> 8) & 0xFF0000)
    x = tl.reshape(tl.join(tl.join(t0, t2), tl.join(t1, x3)), w0.shape)
    a, b = ((w0 >> 10) & 0x3FFFC0) | (x & 63), ((w0 << 6) & 0x3FFFC0) | ((x >> 6) & 63)
    c, d = ((w1 >> 10) & 0x3FFFC0) | ((x >> 12) & 63), ((w1 << 6) & 0x3FFFC0) | ((x >> 18) & 63)
    return a, b, c, d


@triton.jit
def _rounded(own, p):  # type: ignore[no-untyped-def]
    """The bits of bf16(own + p), in 32."""
    return narrow(own.to(tl.float32, bitcast=True) + p).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _sums(own, codes, exponent):  # type: ignore[no-untyped-def]
    """Rounded sums of four quads with what is known of the peer's, two words a quad → those words, which are open."""
    base = _base(exponent)[:, None]
    step = _step(base)
    low, high = _ends(codes[0], base, step)
    a = _rounded(own[0], low)
    opened = a != _rounded(own[0], high)
    low, high = _ends(codes[1], base, step)
    b = _rounded(own[1], low)
    opened |= b != _rounded(own[1], high)
    low, high = _ends(codes[2], base, step)
    c = _rounded(own[2], low)
    opened |= c != _rounded(own[2], high)
    low, high = _ends(codes[3], base, step)
    d = _rounded(own[3], low)
    opened |= d != _rounded(own[3], high)
    return a | (b << 16), c | (d << 16), opened | (exponent == 255)[:, None]


@triton.jit
def _store(y, i, r0, r1, here):  # type: ignore[no-untyped-def]
    """Quads of bf16, two words each, to y[i]."""
    x = tl.join(tl.join(r0, r1), tl.join(r0 >> 16, r1 >> 16)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(y + i, tl.reshape(x, (r0.shape[0], 4, 4)), mask=here)


@triton.jit
def _bytes(words, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the exponents lie, behind the words of a step."""
    return (words + 2 * STEP + 3 * (STEP // 4)).to(tl.pointer_type(tl.int8))


@triton.jit
def _push(partial, i, here, to, keep, local, word, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the partials i their 22.5 bits to the peer's slot, and all bits where the peer can read them."""
    x = tl.load(partial + i, mask=here, other=0.0)
    tl.store(keep + local, x)
    w0, w1, t0, t1, t2, exponent = _words(_quads(x))
    lane = tl.arange(0, word.shape[0])
    tl.store(to + word, w0)
    tl.store(to + STEP + word, w1)
    tl.store(to + 2 * STEP + lane, t0)
    tl.store(to + 2 * STEP + STEP // 4 + lane, t1)
    tl.store(to + 2 * STEP + STEP // 2 + lane, t2)
    tl.store(_bytes(to, STEP) + lane, exponent.to(tl.int8))


@triton.jit
def _add(y, partial, i, here, came, kept, to, local, word, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounded sums to y and to the peer's slot; of open quads the peer's partials, on their way, and which they are."""
    own = _quads(tl.load(partial + i, mask=here, other=0.0))
    lane = tl.arange(0, word.shape[0])
    w0, w1 = tl.load(came + word, cache_modifier=".cg"), tl.load(came + STEP + word, cache_modifier=".cg")
    t0 = tl.load(came + 2 * STEP + lane, cache_modifier=".cg")
    t1 = tl.load(came + 2 * STEP + STEP // 4 + lane, cache_modifier=".cg")
    t2 = tl.load(came + 2 * STEP + STEP // 2 + lane, cache_modifier=".cg")
    exponent = tl.load(_bytes(came, STEP) + lane, cache_modifier=".cg").to(tl.int32) & 0xFF
    r0, r1, opened = _sums(own, _codes(w0, w1, t0, t1, t2), exponent)
    whole = tl.load(kept + local, mask=opened[:, :, None], other=0.0, volatile=True)
    tl.store(to + word, r0)
    tl.store(to + STEP + word, r1)
    _store(y, i, r0, r1, here)
    return whole, opened


@triton.jit
def _mend(y, partial, i, here, to, asked, word, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of open quads again, with the peer's partials as they are; `asked`: of `_add`."""
    whole, opened = asked
    here = here & opened[:, :, None]
    own, other = _quads(tl.load(partial + i, mask=here, other=0.0)), _quads(whole)
    r0 = _rounded(own[0], other[0].to(tl.float32, bitcast=True))
    r0 |= _rounded(own[1], other[1].to(tl.float32, bitcast=True)) << 16
    r1 = _rounded(own[2], other[2].to(tl.float32, bitcast=True))
    r1 |= _rounded(own[3], other[3].to(tl.float32, bitcast=True)) << 16
    tl.store(to + word, r0, mask=opened)
    tl.store(to + STEP + word, r1, mask=opened)
    _store(y, i, r0, r1, here)


@triton.jit
def _keep(
    y, results, first, turn, program, programs, peer, part, n, values, word, BLOCK: tl.constexpr, STEP: tl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """What the peer has summed up in the turn before."""
    STEPS: tl.constexpr = BLOCK // (4 * STEP)
    slot = (first + (turn - 2) % SLOTS) * STEPS
    for h in tl.static_range(STEPS):
        j = ((turn - 2) * programs + program).to(tl.int64) * BLOCK + h * (4 * STEP) + values
        i = peer.to(tl.int64) * part + j
        at = results + (slot + h) * (2 * STEP) + word
        r0, r1 = tl.load(at, cache_modifier=".cg"), tl.load(at + STEP, cache_modifier=".cg")
        _store(y, i, r0, r1, (j < part) & (i < n))


@triton.jit(do_not_specialize=["rank", "rounds"])
def trimmed_kernel(
    y, partial, bases, counts, n, part, rounds, rank,
    BLOCK: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr, WHOLE: tl.constexpr, RESULTS: tl.constexpr,
    FLAGS: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Turns and flags as of `two_shot_kernel`; LANES: threads. The whole partials of a chunk lie in a slot of the rank
    that sent it and are read in the turn that adds it up, so what protects the slots of partials protects them too.
    """
    program, programs, peer = tl.program_id(0), tl.num_programs(0), 1 - rank
    STEP: tl.constexpr = 4 * LANES  # quads at a time
    STEPS: tl.constexpr = BLOCK // (4 * STEP)
    ROOM: tl.constexpr = 11 * LANES + LANES // 4  # words of a step on the wire
    lane, four = tl.arange(0, LANES), tl.arange(0, 4)
    # Of a step: the values of a lane's quads, and the place of a quad in a slot.
    values = lane[:, None, None] * 4 + four[None, :, None] * STEP + four[None, None, :]
    word = lane[:, None] * 4 + four[None, :]
    base = tl.load(counts + program)
    first = program * SLOTS
    came, there = _region(bases, rank, SUMS, tl.int32), _region(bases, peer, SUMS, tl.int32)
    keep, kept = _region(bases, rank, WHOLE, tl.float32), _region(bases, peer, WHOLE, tl.float32)
    results, away = _region(bases, rank, RESULTS, tl.int32), _region(bases, peer, RESULTS, tl.int32)
    flag = _region(bases, rank, FLAGS, tl.int32) + program * 2 + peer
    signal = _region(bases, peer, FLAGS, tl.int32) + program * 2 + rank
    for turn in range(rounds + 2):
        if turn < rounds:
            slot = (first + turn % SLOTS) * STEPS
            for h in tl.static_range(STEPS):
                j = (turn * programs + program).to(tl.int64) * BLOCK + h * (4 * STEP) + values
                i = peer.to(tl.int64) * part + j
                to, at = there + (slot + h) * ROOM, keep + (slot + h) * (4 * STEP)
                _push(partial, i, (j < part) & (i < n), to, at, values, word, STEP)
        if turn > 0:
            _wait(flag, base + turn)
        if (turn > 0) & (turn <= rounds):
            slot = (first + (turn - 1) % SLOTS) * STEPS
            asked = ()
            for h in tl.static_range(STEPS):
                j = ((turn - 1) * programs + program).to(tl.int64) * BLOCK + h * (4 * STEP) + values
                i = rank.to(tl.int64) * part + j
                at = slot + h
                asked = asked + (_add(y, partial, i, (j < part) & (i < n), came + at * ROOM, kept + at * (4 * STEP),
                                      away + at * (2 * STEP), values, word, STEP),)  # fmt: skip
            if turn > 1:  # while what was asked for is on its way
                _keep(y, results, first, turn, program, programs, peer, part, n, values, word, BLOCK, STEP)
            for h in tl.static_range(STEPS):
                j = ((turn - 1) * programs + program).to(tl.int64) * BLOCK + h * (4 * STEP) + values
                i = rank.to(tl.int64) * part + j
                _mend(y, partial, i, (j < part) & (i < n), away + (slot + h) * (2 * STEP), asked[h], word, STEP)
        elif turn > 1:
            _keep(y, results, first, turn, program, programs, peer, part, n, values, word, BLOCK, STEP)
        tl.debug_barrier()
        if turn <= rounds:
            _announce(signal, base + turn + 1)
    tl.store(counts + program, base + rounds + 1)
