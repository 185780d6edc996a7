"""Attention forward on Hopper: which tile is whose, and the warp that copies queries, keys and values.

Programs take tiles as they are done with others, the longest first, and the copying warp tells the others by `letter`
which tile its queries are of.

Keys and values lie one after another, or in the pages of a cache, which are copied a page (or 64 keys of one) at a time
to where a whole block would lie: in panels of 64 columns, as the matrix instruction reads them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from rl_kernel.ops.attention.gluon_blocks import BLOCK, PAIR

TILE = gl.constexpr(128)  # queries of a tile, of which each warpgroup has half
PANEL = gl.constexpr(64)  # columns that lie together in shared memory


@gluon.jit
def uniform(x):  # type: ignore[no-untyped-def]
    """x, the same in all threads, and the compiler told so.

    It does not see that of a sum over threads; then a loop whose length depends on it could end for some threads first,
    and what the loop counts (the place of a matrix product's operands) is moved to the scalar unit word by word again
    in each step: a tenth of the time of attention.
    """
    first: gl.constexpr = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
    return gl.inline_asm_elementwise(first, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def find_tile(cu_q, cu_k, lens, sequences, tile, WIDTH: gl.constexpr, PAGE: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Tile number → (sequence, its first query row, queries, first query of the tile, first key row, keys)."""
    r = gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [WARPS], [0]))
    begin = gl.load(cu_q + r, mask=r < sequences, other=0)
    mine = (begin // TILE + r <= tile) & (r < sequences)
    sequence = uniform(gl.sum(mine.to(gl.int32), 0) - 1)
    start = gl.load(cu_q + sequence)
    length, first = gl.load(cu_q + sequence + 1) - start, (tile - start // TILE - sequence) * TILE
    if PAGE:
        return sequence, start, length, first, 0, gl.load(lens + sequence)
    key_start = gl.load(cu_k + sequence)
    return sequence, start, length, first, key_start, gl.load(cu_k + sequence + 1) - key_start


@gluon.jit
def pairs_of(keys, length, first):  # type: ignore[no-untyped-def]
    """Pairs of key blocks that a tile sees: one at least, whatever the offsets say, so that each tile has two steps."""
    return max(gl.cdiv(min(keys, keys - length + first + TILE), PAIR), 1)


@gluon.jit
def _write(letter, slot, start, length, first, keys):  # type: ignore[no-untyped-def]
    """What `read` finds; between the reader's two waits nobody else writes."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    letter.index(0).store(gl.full((1,), slot, gl.int32, L))
    letter.index(1).store(gl.full((1,), start, gl.int32, L))
    letter.index(2).store(gl.full((1,), length, gl.int32, L))
    letter.index(3).store(gl.full((1,), first, gl.int32, L))
    letter.index(4).store(gl.full((1,), keys, gl.int32, L))
    gl.thread_barrier()


@gluon.jit
def read(letter, FIELD: gl.constexpr):  # type: ignore[no-untyped-def]
    """0: tile times heads plus head, -1 when there are no more; 1 to 4: its start, queries, first query and keys."""
    return uniform(gl.max(letter.index(FIELD).load(gl.BlockedLayout([1], [32], [4], [0])), 0))


@gluon.jit
def _rows(table, pair, keys, page_rows, PAGE: gl.constexpr, CHUNK: gl.constexpr):  # type: ignore[no-untyped-def]
    """Row of the cache where each chunk of a pair begins, one a thread; past the last key, that chunk's again."""
    here = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    chunk = min(pair * (PAIR // CHUNK) + here, (keys - 1) // CHUNK)
    return gl.load(table + chunk // (PAGE // CHUNK)) * page_rows + chunk % (PAGE // CHUNK) * CHUNK


@gluon.jit
def _row(rows, NUMBER: gl.constexpr):  # type: ignore[no-untyped-def]
    return gl.sum(gl.where(gl.arange(0, 32, rows.type.layout) == NUMBER, rows, 0), 0)


@gluon.jit
def _pages(
    k, v, k_buffers, v_buffers, slot, bar, these, before, column, pred_k, pred_v, CHUNK: gl.constexpr, D: gl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The keys of one pair and the values of the one before, chunk by chunk and panel by panel."""
    PANELS: gl.constexpr = D // PANEL
    chunks: gl.constexpr = PAIR // CHUNK
    half: gl.constexpr = BLOCK // CHUNK
    k_chunks = k_buffers._reinterpret(gl.bfloat16, [k_buffers.shape[0] * PANELS * chunks, CHUNK, PANEL], k.layout)
    v_chunks = v_buffers._reinterpret(gl.bfloat16, [v_buffers.shape[0] * PANELS * half, CHUNK, PANEL], v.layout)
    for c in gl.static_range(chunks):
        key, value = _row(these, c), _row(before, c)
        for p in gl.static_range(PANELS):
            at = k_chunks.index((slot * PANELS + p) * chunks + c)
            tma.async_copy_global_to_shared(k, [key, column + p * PANEL], bar, at, pred=pred_k)
            at = v_chunks.index(((2 * slot + c // half) * PANELS + p) * half + c % half)
            tma.async_copy_global_to_shared(v, [value, column + p * PANEL], bar, at, pred=pred_v)


@gluon.jit
def _ask(queue, works):  # type: ignore[no-untyped-def]
    """The next tile that nobody has, or a number past the last. Each tile is followed by one asking."""
    asked = uniform(gl.atomic_add(queue, 1, sem="relaxed"))
    if asked == works - 1:
        gl.store(queue, 0)
    return gl.num_programs(0) + asked


@gluon.jit
def copy(
    redo, queue, q, k, v, q_buffer, k_buffers, v_buffers, letter, q_full, q_empty, full, empty, table, cu_q, cu_k, lens,
    sequences, tiles, table_width, page_rows,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Step j of a tile needs the keys of pair j and the values of pair j - 1: one barrier tells that both are here.

    A tile without queries gets its flags here. queue: how many tiles were asked for, 0 before and after.
    """
    CHUNK: gl.constexpr = min(PAGE, BLOCK)
    tiles = uniform(tiles)
    count, turn = 0, 0
    work = gl.program_id(0)
    while work < tiles * HEADS:
        head, tile = work % HEADS, tiles - 1 - work // HEADS
        sequence, start, length, first, key_start, keys = find_tile(
            cu_q, cu_k, lens, sequences, tile, WIDTH, PAGE, 1
        )  # fmt: skip
        again = tile * HEADS + head
        after_this = 0
        if first >= length:
            gl.store(redo + again * 2, 0)
            gl.store(redo + again * 2 + 1, 0)
            after_this = _ask(queue, tiles * HEADS)
        else:
            column = head // (HEADS // KV_HEADS) * D
            pairs = pairs_of(keys, length, first)
            if PAGE:
                pages = table + sequence.to(gl.int64) * table_width
                # Two values that are one at first: of an alias the compiler does not see that the loop changes it.
                these = _rows(pages, 0, keys, page_rows, PAGE, CHUNK)
                before = _rows(pages, 0, keys, page_rows, PAGE, CHUNK)
            for step in range(pairs + 1):
                if PAGE:
                    after = _rows(pages, step + 1, keys, page_rows, PAGE, CHUNK)
                slot = count % STAGES
                mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
                bar = full.index(slot)
                if (step > 0) & (step < pairs):
                    mbarrier.expect(bar, 2 * PAIR * D * 2)
                else:
                    mbarrier.expect(bar, PAIR * D * 2)
                if PAGE:
                    _pages(
                        k, v, k_buffers, v_buffers, slot, bar, these, before, column, step < pairs, step > 0, CHUNK, D
                    )  # fmt: skip
                    before, these = these, after
                else:
                    row = key_start + step * PAIR
                    tma.async_copy_global_to_shared(k, [row, column], bar, k_buffers.index(slot), pred=step < pairs)
                    for half in gl.static_range(2):
                        at = [row - PAIR + half * BLOCK, column]
                        tma.async_copy_global_to_shared(v, at, bar, v_buffers.index(2 * slot + half), pred=step > 0)
                count += 1
                if step == 0:
                    # After the first keys, which need not wait for the end of the tile before.
                    mbarrier.wait(q_empty, (turn & 1) ^ 1)
                    _write(letter, again, start, length, first, keys)
                    mbarrier.expect(q_full, TILE * D * 2)
                    tma.async_copy_global_to_shared(q, [start + first, head * D], q_full, q_buffer)
                    turn += 1
                elif step == 1:
                    after_this = _ask(queue, tiles * HEADS)  # while two steps' keys are on their way
        work = after_this
    mbarrier.wait(q_empty, (turn & 1) ^ 1)
    _write(letter, -1, 0, 0, 0, 0)
    mbarrier.arrive(q_full)
