"""Attention forward on Hopper: what one warpgroup does with two key blocks after another for its 64 queries.

A step takes the blocks in pairs, so that the product of the scores is 128 keys wide and reads 96 bytes of shared memory
a cycle and not 128. It sums up the pair before and scores this one: while the scores are computed, the sums so far get
what they are worth under the second block's maximum. The order within a row stays the contract's: block by block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

ROWS = gl.constexpr(64)  # queries of a warpgroup
BLOCK = gl.constexpr(64)
PAIR = gl.constexpr(128)
ONES = gl.constexpr(8)  # columns of ones; all hold l
NEG_INF = gl.constexpr(float("-inf"))

# Of the scores of a pair and of a block, and of the row sums; the output's layout depends on head_dim.
PAIR_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
SUMS_WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=SUMS.value, k_width=2))


@gluon.jit
def rows(x, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """One value a row, to be broadcast along the columns of LAYOUT."""
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def worth(m_all, l_all, m, l):  # type: ignore[no-untyped-def]
    """A partial joins those before it, as in triton_blocks.merge → (maximum, row sum, what both sides are worth)."""
    top = gl.maximum(m_all, m)
    shift = gl.where(top == NEG_INF, 0.0, top)
    a, b = gl.exp2(m_all - shift), gl.exp2(m - shift)
    return top, l_all * rows(a, SUMS) + l * rows(b, SUMS), a, b


@gluon.jit
def _merge(m_all, l_all, merged, m, l, acc):  # type: ignore[no-untyped-def]
    """End of a partial that is not the last; the sums of those before it lie in `merged`."""
    O: gl.constexpr = acc.type.layout
    m_all, l_all, a, b = worth(m_all, l_all, m, l)
    merged.store(merged.load(O) * rows(a, O) + acc * rows(b, O))
    return m_all, l_all, gl.zeros_like(l), gl.zeros_like(acc)


@gluon.jit
def _softmax(s, m, scale, opens, hidden):  # type: ignore[no-untyped-def]
    """Scores of one block, not scaled yet, -inf where hidden → (p, what the sums so far are worth, the maximum).

    hidden: of the rows that see nothing of the block; their -inf - -inf would be NaN, and zeros are due.
    """
    before = gl.where(opens, NEG_INF, m)
    # Rounding keeps order, so the largest score scaled is the largest of the scaled ones.
    top = gl.maximum(before, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - gl.where(hidden, 0.0, top)[:, None])
    # A row that has seen no key of this partial yet keeps its zeros.
    return p, gl.where(top == NEG_INF, 1.0, gl.exp2(before - top)), top


@gluon.jit
def operand(p, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """Weights rounded to bf16, as the left side of the product with the values."""
    return gl.convert_layout(p.to(gl.bfloat16), P)


@gluon.jit
def _halves(s):  # type: ignore[no-untyped-def]
    """Scores of a pair → those of its blocks."""
    a, b = gl.split(gl.permute(gl.reshape(s, (ROWS, 2, BLOCK)), (0, 2, 1)))
    return gl.convert_layout(a, SCORES), gl.convert_layout(b, SCORES)


@gluon.jit
def hold(x):  # type: ignore[no-untyped-def]
    """A loop that ends at once: over none does the assembler move an instruction, as it does over a wait."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .u32 now;
            .reg .pred never;
        again:
            mov.u32 now, %clock;
            setp.eq.u32 never, now, $1;
            @never bra again;
            mov.u32 $0, now;
        }
        """,
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def full_step(
    a, b, beta, m, l_done, acc_done, m_all, l_all, count, pair, queries, buffers, bars, scale,
    STAGES: gl.constexpr, PARTIAL: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """A pair that every row sees in full, and one before it.

    a, b: weights of the pair before; beta: what the sums up to its first block are worth under its maximum m. l_done,
    acc_done: the open partial without that pair, as they count under its first block's maximum; m_all, l_all and what
    lies in `merged`: the partials before. count: steps so far. Returns the same after this pair.
    """
    keys, values, ones, merged = buffers
    full, empty = bars
    O: gl.constexpr = acc_done.type.layout
    P: gl.constexpr = a.type.layout
    slot = count % STAGES
    mbarrier.wait(full.index(slot), (count // STAGES) & 1)
    acc = warpgroup_mma(a, values.index(2 * slot), acc_done, is_async=True)
    l = warpgroup_mma(gl.convert_layout(a, SUMS_WEIGHTS), ones, l_done, is_async=True)
    nothing = gl.zeros((ROWS, PAIR), gl.float32, PAIR_SCORES)
    these = keys.index(slot).permute((1, 0))
    scores = warpgroup_mma(queries, these, nothing, use_acc=False, is_async=True)
    acc_done, l_done, _a = warpgroup_mma_wait(1, (acc, l, a))
    acc_done = acc_done * rows(beta, O)
    l_done = l_done * rows(beta, SUMS)
    acc = warpgroup_mma(b, values.index(2 * slot + 1), acc_done, is_async=True)
    l = warpgroup_mma(gl.convert_layout(b, SUMS_WEIGHTS), ones, l_done, is_async=True)
    s = warpgroup_mma_wait(2, (scores,))
    opens = pair % (PARTIAL // PAIR) == 0
    s_a, s_b = _halves(s)
    p_a, alpha, top = _softmax(s_a, m, scale, opens, False)
    a = operand(p_a, P)
    p_b, beta, top = _softmax(s_b, top, scale, False, False)
    hold(count)  # the exponentials overlap with the last product
    acc_done, l_done, _b, a, p_b = warpgroup_mma_wait(0, (acc, l, b, a, p_b))
    b = operand(p_b, P)  # not before its registers are read for the last time: else each step would copy them
    mbarrier.arrive(empty.index(slot))
    if opens:
        m_all, l_all, l_done, acc_done = _merge(m_all, l_all, merged, m, l_done, acc_done)
    return a, b, beta, top, l_done * rows(alpha, SUMS), acc_done * rows(alpha, O), m_all, l_all


@gluon.jit
def _hide(s, last):  # type: ignore[no-untyped-def]
    """s[ROWS,PAIR], -inf in the columns past last[ROWS].

    A column is eight times what its register says, plus what the thread says: so a comparison has a constant, and
    nothing that depends on the column stays in registers.
    """
    s = gl.reshape(s, (ROWS, PAIR // 8, 8))
    L: gl.constexpr = s.type.layout
    high = gl.arange(0, PAIR // 8, gl.SliceLayout(0, gl.SliceLayout(2, L))) * 8
    low = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    last = gl.convert_layout(last, gl.SliceLayout(1, gl.SliceLayout(1, L)))
    seen = high[None, :, None] <= (last[:, None] - low[None, :])[:, None, :]
    return gl.convert_layout(gl.reshape(gl.where(seen, s, NEG_INF), (ROWS, PAIR)), PAIR_SCORES)


@gluon.jit
def edge_step(
    a, b, beta, m, l_done, acc_done, m_all, l_all, count, pair, places, last, queries, buffers, bars, scale,
    STAGES: gl.constexpr, PARTIAL: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """A pair of which some row may not see all, or the first, which has none before it, or the end, which scores none.

    places: pairs of the tile, pairs that each row sees in full, the last key that any row sees; last[rows]: the last
    that each sees. The end leaves the open partial to the caller. Nothing overlaps here: few steps are such, and code
    that is small stays in the instruction cache.
    """
    pairs, full_pairs, highest = places
    keys, values, ones, merged = buffers
    full, empty = bars
    O: gl.constexpr = acc_done.type.layout
    P: gl.constexpr = a.type.layout
    slot = count % STAGES
    mbarrier.wait(full.index(slot), (count // STAGES) & 1)
    if pair > 0:
        # A value that is hidden from a row counts as zero times it: NaN, if it is not finite, and that sum is redone.
        acc = warpgroup_mma(a, values.index(2 * slot), acc_done, is_async=True)
        l = warpgroup_mma(gl.convert_layout(a, SUMS_WEIGHTS), ones, l_done, is_async=True)
        acc_done, l_done, _a = warpgroup_mma_wait(0, (acc, l, a))
        acc_done = acc_done * rows(beta, O)
        l_done = l_done * rows(beta, SUMS)
        if pair * PAIR - BLOCK <= highest:
            acc = warpgroup_mma(b, values.index(2 * slot + 1), acc_done, is_async=True)
            l = warpgroup_mma(gl.convert_layout(b, SUMS_WEIGHTS), ones, l_done, is_async=True)
            acc_done, l_done, _b = warpgroup_mma_wait(0, (acc, l, b))
    opens = pair % (PARTIAL // PAIR) == 0
    alpha, top = gl.full_like(m, 1.0), m
    if pair < pairs:
        nothing = gl.zeros((ROWS, PAIR), gl.float32, PAIR_SCORES)
        s = warpgroup_mma(queries, keys.index(slot).permute((1, 0)), nothing, use_acc=False)
        key = pair * PAIR
        if pair >= full_pairs:
            s = _hide(s, last - key)
        s_a, s_b = _halves(s)
        p_a, alpha, top = _softmax(s_a, m, scale, opens, last < key)
        a = operand(p_a, P)
        beta, b = gl.full_like(m, 1.0), gl.zeros((ROWS, BLOCK), gl.bfloat16, P)
        if key + BLOCK <= highest:
            p_b, beta, top = _softmax(s_b, top, scale, False, last < key + BLOCK)
            b = operand(p_b, P)
    mbarrier.arrive(empty.index(slot))
    if opens & (pair > 0) & (pair < pairs):
        m_all, l_all, l_done, acc_done = _merge(m_all, l_all, merged, m, l_done, acc_done)
    if (pair < pairs) & (opens == 0):  # a partial that opens has zeros
        l_done = l_done * rows(alpha, SUMS)
        acc_done = acc_done * rows(alpha, O)
    return a, b, beta, top, l_done, acc_done, m_all, l_all
