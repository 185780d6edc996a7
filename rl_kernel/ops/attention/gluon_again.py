"""What `gluon_kernel` leaves: one wave of programs reads its flags, and a flagged tile goes the plain kernel's way."""

from typing import Any

import torch
import triton
import triton.language as tl

from rl_kernel.ops.accelerator import multiprocessors
from rl_kernel.ops.attention.triton_prefill import constants, launch_for, prefill_tile

FLAGS = 128  # tiles whose flags a program reads at once


@triton.jit(do_not_specialize=["sequences", "tiles"])
def again_kernel(
    out, m_out, l_out, q, k, v, table, cu_q, cu_k, lens, redo, sequences, tiles, table_width, q_token,
    k_page, k_token, v_page, v_token, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PARTIAL: tl.constexpr,
    PAGE: tl.constexpr, TMA: tl.constexpr, EX2: tl.constexpr, FLAGS: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The tiles of which redo[tiles,H,2] says so: few or none. A program looks at its share of the flags at once."""
    share = tl.cdiv(tiles * HEADS, tl.num_programs(0))
    begin = tl.program_id(0) * share
    end = min(begin + share, tiles * HEADS)
    for some in range(begin, end, FLAGS):
        at = 2 * some + tl.arange(0, 2 * FLAGS)
        if tl.max(tl.load(redo + at, mask=at < 2 * end, other=0)) > 0:
            for work in range(some, min(some + FLAGS, end)):
                if tl.load(redo + 2 * work) + tl.load(redo + 2 * work + 1) > 0:
                    prefill_tile(
                        out, m_out, l_out, q, k, v, table, cu_q, cu_k, lens, work // HEADS, work % HEADS, sequences,
                        table_width, q_token, k_page, k_token, v_page, v_token, scale,
                        HEADS, KV_HEADS, D, 1, 128, WIDTH, PARTIAL, PAGE, TMA, EX2,
                    )  # fmt: skip


def again(
    redo: torch.Tensor, outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...], places: tuple[torch.Tensor, ...],
    strides: tuple[int, ...], kv_heads: int, page: int, scale: float,
) -> None:  # fmt: skip
    """As `triton_prefill.prefill`, only where redo[tiles,H,2] says so."""
    (tiles, heads, _), shape = redo.shape, launch_for(tensors[0].shape[2])
    again_kernel[(min(tiles * heads, multiprocessors(redo.get_device())),)](
        *outputs, *tensors, *places, redo, places[1].shape[0] - 1, tiles, *strides, scale, FLAGS=FLAGS,
        **constants(tensors[0], tensors[1], places, kv_heads, page),
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
