"""Attention on GPUs, a tile of rows a program: what serves a prefill anywhere.

Hopper has a kernel of its own for it (`gluon_kernel`) and does with this one what that leaves (`gluon_again`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from rl_kernel.contracts.v1 import KV_PARTIAL
from rl_kernel.ops.accelerator import EX2
from rl_kernel.ops.attention.triton_blocks import BLOCK, ONES, attend, find_sequence, merge, width_for
from rl_kernel.ops.triton_scalar import NEG_INF, canonical, narrow


@triton.jit
def prefill_tile(
    out, m_out, l_out, q, k, v, table, cu_q, cu_k, lens, tile, part, head, d, sequences, table_width, q_token,
    k_page, k_token, v_page, v_token, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PARTIAL: tl.constexpr, PAGE: tl.constexpr,
    TMA: tl.constexpr, EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """ROWS rows of one head (or of the PACK heads of one kv head, from `head` on) against all their keys.

    They are part `part` of the PARTS of a tile; of the output, COLUMNS columns from d on are computed.
    """
    queries: tl.constexpr = ROWS // PACK
    sequence, start, length, first_query = find_sequence(cu_q, sequences, tile, PARTS * queries, WIDTH)
    first_query += part * queries
    if first_query < length:
        kv_head = head // (HEADS // KV_HEADS)
        key_start = 0
        if PAGE:
            keys = tl.load(lens + sequence)
            table += sequence.to(tl.int64) * table_width
        else:
            key_start = tl.load(cu_k + sequence)
            keys = tl.load(cu_k + sequence + 1) - key_start
            if not TMA:
                k += key_start.to(tl.int64) * k_token
                v += key_start.to(tl.int64) * v_token
        row = tl.arange(0, ROWS)
        query_index = first_query + row // PACK
        here = (query_index < length) & (row < queries * PACK)
        last = keys - length + query_index
        place = (start + query_index).to(tl.int64) * HEADS + head + row % PACK
        q_at = (start + query_index).to(tl.int64) * q_token + (head + row % PACK) * D
        query = tl.load(q + q_at[:, None] + tl.arange(0, D)[None, :], mask=here[:, None], other=0.0)

        # Blocks that every row sees in full, then those that need a mask.
        visible = min(keys, keys - length + first_query + queries)
        full = (keys - length + first_query + 1) // BLOCK
        end = tl.cdiv(visible, BLOCK)
        m = tl.full((ROWS,), NEG_INF, tl.float32)
        l = tl.zeros((ROWS, ONES), tl.float32)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        m_all, l_all, acc_all = m, l, acc
        m, l, acc, m_all, l_all, acc_all = attend(
            m, l, acc, m_all, l_all, acc_all, query, k, v, table, 0, full, keys, last, scale, key_start,
            kv_head * D, kv_head * D + d, k_page, k_token, v_page, v_token, False, D, PARTIAL, PAGE, TMA, EX2,
        )  # fmt: skip
        m, l, acc, m_all, l_all, acc_all = attend(
            m, l, acc, m_all, l_all, acc_all, query, k, v, table, max(0, full), end, keys, last, scale, key_start,
            kv_head * D, kv_head * D + d, k_page, k_token, v_page, v_token, True, D, PARTIAL, PAGE, TMA, EX2,
        )  # fmt: skip
        m, l, acc = merge(m_all, l_all, acc_all, m, l, acc, EX2)
        row_sum = tl.max(l, 1)
        value = narrow(tl.div_rn(acc + 0.0, row_sum[:, None] + tl.zeros_like(acc)))
        tl.store(out + place[:, None] * D + d + tl.arange(0, COLUMNS)[None, :], value, mask=here[:, None])
        tl.store(m_out + place, canonical(m), mask=here)
        tl.store(l_out + place, canonical(row_sum), mask=here)


@triton.jit(do_not_specialize=["sequences"])
def attention_kernel(
    out, m_out, l_out, q, k, v, table, cu_q, cu_k, lens, sequences, table_width, q_token,
    k_page, k_token, v_page, v_token, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PARTIAL: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr, EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """A program for each tile, the longest first.

    PAGE: keys a page of the cache, 0 where k and v are [T',G,D] with offsets cu_k. TMA: k and v are descriptors.
    """
    prefill_tile(
        out, m_out, l_out, q, k, v, table, cu_q, cu_k, lens, tl.num_programs(1) - 1 - tl.program_id(1), 0,
        tl.program_id(0) * PACK, 0, sequences, table_width, q_token, k_page, k_token, v_page, v_token, scale,
        HEADS, KV_HEADS, D, PACK, ROWS, 1, D, WIDTH, PARTIAL, PAGE, TMA, EX2,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """Rows of a tile, heads that share it, warps, stages. No bit depends on it."""

    rows: int
    pack: int
    warps: int
    stages: int


def launch_for(dim: int) -> Launch:
    """The static launch table."""
    return Launch(128, 1, 8, 2 if dim > 128 else 3)


def constants(q: torch.Tensor, keys: Any, places: tuple[torch.Tensor, ...], kv_heads: int, page: int) -> dict[str, Any]:
    """What `prefill_tile` is compiled for. keys: a tensor or a descriptor; places: table, cu_q, cu_k, lens."""
    return {
        "HEADS": q.shape[1], "KV_HEADS": kv_heads, "D": q.shape[2], "WIDTH": width_for(places[1].shape[0] - 1),
        "PARTIAL": KV_PARTIAL, "PAGE": page, "TMA": not isinstance(keys, torch.Tensor), "EX2": EX2,
    }  # fmt: skip


def prefill(
    outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...], places: tuple[torch.Tensor, ...],
    strides: tuple[int, ...], kv_heads: int, page: int, scale: float, shape: Launch,
) -> None:  # fmt: skip
    """Fill out[T,H,D], m and l[T,H] from q[T,H,D], keys and values (tensors or descriptors); places as in `constants`.

    strides: of table rows, queries, pages and tokens of keys, of values.
    """
    (tokens, heads, _dim), sequences = tensors[0].shape, places[1].shape[0] - 1
    attention_kernel[(heads // shape.pack, tokens // (shape.rows // shape.pack) + sequences)](
        *outputs, *tensors, *places, sequences, *strides, scale, PACK=shape.pack, ROWS=shape.rows,
        **constants(tensors[0], tensors[1], places, kv_heads, page),
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
