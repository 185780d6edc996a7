"""What the Triton kernels of attention share: whose rows a tile holds, one block after another, partials that merge."""

import triton
import triton.language as tl

from rl_kernel.contracts.v1 import KV_BLOCK
from rl_kernel.ops.triton_scalar import NEG_INF, exp2

ONES = tl.constexpr(16)  # columns of ones; all hold l
BLOCK = tl.constexpr(KV_BLOCK)


@triton.jit
def find_sequence(cu_q, sequences, tile, QUERIES: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tile number → (sequence, its first query row, its number of queries, first query of the tile).

    Sequence r owns the tiles from cu_q[r] // QUERIES + r on: never fewer than it needs, so the grid follows from
    T and R alone and no length is read back to the host.
    """
    r = tl.arange(0, WIDTH)
    begin = tl.load(cu_q + r, mask=r < sequences, other=0)
    mine = (begin // QUERIES + r <= tile) & (r < sequences)
    sequence = tl.sum(mine.to(tl.int32)) - 1
    start = tl.load(cu_q + sequence)
    return sequence, start, tl.load(cu_q + sequence + 1) - start, (tile - start // QUERIES - sequence) * QUERIES


@triton.jit
def not_finite(p, seen, wide, odd):  # type: ignore[no-untyped-def]
    """What the infinities and NaNs among the values of one block add to each row that sees them: 0, ±inf or NaN.

    They are counted by a product of small powers of two, which is without error: 1 for +inf, 2^8 for -inf, 2^16 for
    NaN and for infinity times zero.
    """
    code = tl.where(wide == float("inf"), 1.0, tl.where(wide == NEG_INF, 256.0, tl.where(odd, 65536.0, 0.0)))
    some = tl.where(seen & (p > 0.0), 1.0, 0.0).to(tl.bfloat16)
    none = tl.where(seen & (p == 0.0), 1.0, 0.0).to(tl.bfloat16)
    count = tl.dot(some, code.to(tl.bfloat16))
    count = tl.dot(none, tl.where(odd, 65536.0, 0.0).to(tl.bfloat16), count).to(tl.int32)
    plus, minus = (count & 255) > 0, ((count >> 8) & 255) > 0
    infinite = tl.where(plus, float("inf"), tl.where(minus, NEG_INF, 0.0))
    return tl.where((count > 65535) | (plus & minus), float("nan"), infinite)


@triton.jit
def merge(m1, l1, acc1, m2, l2, acc2, EX2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two neighbouring partials into one; an empty one (m = -inf, l = 0, acc = 0) changes no bit of the other."""
    m = tl.maximum(m1, m2)
    shift = tl.where(m == NEG_INF, 0.0, m)
    a, b = exp2(m1 - shift, EX2), exp2(m2 - shift, EX2)
    return m, l1 * a[:, None] + l2 * b[:, None], acc1 * a[:, None] + acc2 * b[:, None]


@triton.jit
def attend(
    m, l, acc, m_all, l_all, acc_all, query, k, v, table, begin, end, keys, last, scale, start, column, v_column,
    k_page, k_token, v_page, v_token,
    MASKED: tl.constexpr, D: tl.constexpr, PARTIAL: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr,
    EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Blocks begin .. end of 64 keys. m, l, acc: the open partial; m_all, l_all, acc_all: those before it, merged.

    keys: of the sequence; last[rows]: the last key that each row sees. acc holds as many columns of the values as it
    has, from v_column on: no column knows of another.
    """
    columns = column + tl.arange(0, D)
    v_columns = v_column + tl.arange(0, acc.shape[1])
    for block in range(begin, end):
        key = block * BLOCK + tl.arange(0, BLOCK)
        if TMA:
            keys_in = k.load([start + block * BLOCK, column])
        else:
            if PAGE:
                page = tl.load(table + key // PAGE, mask=key < keys, other=0).to(tl.int64)
                k_at, v_at = page * k_page + key % PAGE * k_token, page * v_page + key % PAGE * v_token
            else:
                k_at, v_at = key.to(tl.int64) * k_token, key.to(tl.int64) * v_token
            k_from, v_from = k + k_at[:, None] + columns[None, :], v + v_at[:, None] + v_columns[None, :]
            if MASKED:
                keys_in = tl.load(k_from, mask=(key < keys)[:, None], other=0.0)
            else:
                keys_in = tl.load(k_from)
        s = tl.dot(query, tl.trans(keys_in)) * scale
        if MASKED:
            seen = key[None, :] <= last[:, None]
            s = tl.where(seen, s, NEG_INF)
        opens = block % (PARTIAL // BLOCK) == 0
        before = tl.where(opens, NEG_INF, m)
        top = tl.maximum(before, tl.max(s, 1))
        p = exp2(s - top[:, None], EX2)
        if MASKED:
            p = tl.where(seen, p, 0.0)
        # A row that has seen no key of this partial yet keeps its zeros; -inf - -inf would be NaN.
        alpha = tl.where(top == NEG_INF, 1.0, exp2(before - top, EX2))
        weights = p.to(tl.bfloat16)
        if TMA:
            values = v.load([start + block * BLOCK, v_column])
        elif MASKED:
            values = tl.load(v_from, mask=(key < keys)[:, None], other=0.0)
        else:
            values = tl.load(v_from)
        # Here, and not where the partial opens: until here the product of the block before may still be running.
        if opens & (block > 0):
            m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m, l, acc, EX2)
            l = tl.zeros_like(l)
            acc = tl.zeros_like(acc)
        m = top
        acc = acc * alpha[:, None]
        if MASKED:
            # 0 * inf would be NaN: what a row does not see must not reach it, so such values take a way of their own.
            wide = values.to(tl.float32)
            odd = (wide - wide) != 0.0
            if tl.max(odd.to(tl.int32)) > 0:
                acc += not_finite(p, seen, wide, odd)
                values = tl.where(odd, 0.0, wide).to(tl.bfloat16)
        acc = tl.dot(weights, values, acc)
        l = tl.dot(weights, tl.full((BLOCK, ONES), 1.0, tl.bfloat16), l * alpha[:, None])
    return m, l, acc, m_all, l_all, acc_all


def width_for(sequences: int) -> int:
    """Offsets that a kernel reads at once: a power of 4 from 16 on, so that few variants of it are ever compiled."""
    width = 16
    while width < sequences:
        width *= 4
    return width
