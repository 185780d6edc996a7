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
def _merge(m_all, l_all, merged, m, l, acc):  # type: ignore[no-untyped-def]
    """End of a partial: it joins those before it, whose sums lie in `merged`, as in triton_blocks.merge."""
    O: gl.constexpr = acc.type.layout
    top = gl.maximum(m_all, m)
    shift = gl.where(top == NEG_INF, 0.0, top)
    a, b = gl.exp2(m_all - shift), gl.exp2(m - shift)
    merged.store(merged.load(O) * rows(a, O) + acc * rows(b, O))
    return top, l_all * rows(a, SUMS) + l * rows(b, SUMS), gl.zeros_like(l), gl.zeros_like(acc)


@gluon.jit
def _softmax(s, m, scale, opens, seen, MASKED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of one block, not scaled yet → (p, what the sums so far are worth, the maximum)."""
    if MASKED:
        s = gl.where(seen, s, NEG_INF)
    before = gl.where(opens, NEG_INF, m)
    # Rounding keeps order, so the largest score scaled is the largest of the scaled ones.
    top = gl.maximum(before, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - top[:, None])
    if MASKED:
        p = gl.where(seen, p, 0.0)
    # A row that has seen no key of this partial yet keeps its zeros; -inf - -inf would be NaN.
    return p, gl.where(top == NEG_INF, 1.0, gl.exp2(before - top)), top


@gluon.jit
def operand(p, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """Weights rounded to bf16, as the left side of the product with the values."""
    return gl.convert_layout(p.to(gl.bfloat16), P)


@gluon.jit
def _pair(s, m, scale, opens, seen_a, seen_b, P: gl.constexpr, MASKED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of a pair → the blocks' weights, the first ones as an operand, what the sums before each are worth, m."""
    a, b = gl.split(gl.permute(gl.reshape(s, (ROWS, 2, BLOCK)), (0, 2, 1)))
    p_a, alpha, top = _softmax(gl.convert_layout(a, SCORES), m, scale, opens, seen_a, MASKED)
    p_b, beta, top = _softmax(gl.convert_layout(b, SCORES), top, scale, False, seen_b, MASKED)
    return operand(p_a, P), p_b, alpha, beta, top


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
    a, p_b, alpha, beta, top = _pair(s, m, scale, opens, True, True, P, False)
    acc_done, l_done, _b, a, p_b = warpgroup_mma_wait(0, (acc, l, b, a, p_b))
    b = operand(p_b, P)  # not before its registers are read for the last time: else each step would copy them
    mbarrier.arrive(empty.index(slot))
    if opens:
        m_all, l_all, l_done, acc_done = _merge(m_all, l_all, merged, m, l_done, acc_done)
    return a, b, beta, top, l_done * rows(alpha, SUMS), acc_done * rows(alpha, O), m_all, l_all


@gluon.jit
def edge_step(
    a, b, beta, m, l_done, acc_done, m_all, l_all, count, pair, pairs, last, queries, buffers, bars, scale,
    STAGES: gl.constexpr, PARTIAL: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """A pair of which some row may not see all, or the first, which has none before it, or the end, which closes all.

    last[rows]: the last key that each row sees. Nothing overlaps here: few steps are such, and code that is small
    stays in the instruction cache.
    """
    keys, values, ones, merged = buffers
    full, empty = bars
    O: gl.constexpr = acc_done.type.layout
    P: gl.constexpr = a.type.layout
    slot = count % STAGES
    mbarrier.wait(full.index(slot), (count // STAGES) & 1)
    if pair > 0:
        # A value that is hidden from a row counts as zero times it: NaN, if it is not finite, and that sum is redone.
        acc_done = warpgroup_mma(a, values.index(2 * slot), acc_done) * rows(beta, O)
        l_done = warpgroup_mma(gl.convert_layout(a, SUMS_WEIGHTS), ones, l_done) * rows(beta, SUMS)
        acc_done = warpgroup_mma(b, values.index(2 * slot + 1), acc_done)
        l_done = warpgroup_mma(gl.convert_layout(b, SUMS_WEIGHTS), ones, l_done)
    opens = pair % (PARTIAL // PAIR) == 0
    alpha, top = gl.full_like(m, 1.0), m
    if pair < pairs:
        nothing = gl.zeros((ROWS, PAIR), gl.float32, PAIR_SCORES)
        s = warpgroup_mma(queries, keys.index(slot).permute((1, 0)), nothing, use_acc=False)
        key = pair * PAIR + gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
        seen_a, seen_b = key[None, :] <= last[:, None], key[None, :] + BLOCK <= last[:, None]
        a, p_b, alpha, beta, top = _pair(s, m, scale, opens, seen_a, seen_b, P, True)
        b = operand(p_b, P)
    mbarrier.arrive(empty.index(slot))
    if (pair == pairs) | (opens & (pair > 0)):
        m_all, l_all, l_done, acc_done = _merge(m_all, l_all, merged, m, l_done, acc_done)
    return a, b, beta, top, l_done * rows(alpha, SUMS), acc_done * rows(alpha, O), m_all, l_all
