"""What `gluon_kernel` leaves: programs read its flags; a flagged half tile goes the plain kernel's way.

Nearly always no flag is set, so what counts is what the launch costs the kernels beside it. One that uses local memory
costs some microseconds more than its own time, so a program takes few columns of the output at once: its registers hold
them, and a flagged half tile is slow.
"""

import torch
import triton
import triton.language as tl

from rl_kernel.ops.attention.triton_prefill import constants, prefill_tile
from rl_kernel.ops.dependent_launch import DEPENDENT, announce, await_before

FLAGS = 32  # half tiles a program, whose flags each warp reads by itself
COLUMNS = 16  # of the output that are computed at once
SHAPE = {"num_warps": 8, "num_stages": 2}  # without spills, which tests/rl_kernel/test_gluon_compiles.py holds it to


@triton.jit(do_not_specialize=["sequences", "tiles"])
def again_kernel(
    out, m_out, l_out, q, k, v, table, cu_q, cu_k, lens, redo, sequences, tiles, table_width, q_token,
    k_page, k_token, v_page, v_token, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    PARTIAL: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr, EX2: tl.constexpr, FLAGS: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The half tiles of which redo[tiles,H,2] says so: few or none."""
    announce()
    await_before()
    first = tl.program_id(0) * FLAGS
    at = first + tl.arange(0, FLAGS)
    end = tiles * HEADS * 2
    if tl.max(tl.load(redo + at, mask=at < end, other=0)) > 0:
        for half in range(first, min(first + FLAGS, end)):
            if tl.load(redo + half) > 0:
                for d in range(0, D, COLUMNS):
                    prefill_tile(
                        out, m_out, l_out, q, k, v, table, cu_q, cu_k, lens, half // (2 * HEADS), half % 2,
                        half // 2 % HEADS, d, sequences, table_width, q_token, k_page, k_token, v_page, v_token,
                        scale, HEADS, KV_HEADS, D, 1, 64, 2, COLUMNS, WIDTH, PARTIAL, PAGE, TMA, EX2,
                    )  # fmt: skip


def again(
    redo: torch.Tensor, outputs: tuple[torch.Tensor, ...], tensors: tuple[torch.Tensor, ...],
    places: tuple[torch.Tensor, ...], strides: tuple[int, ...], kv_heads: int, page: int, scale: float,
) -> None:  # fmt: skip
    """As `triton_prefill.prefill`, only where redo[tiles,H,2] says so."""
    again_kernel[(triton.cdiv(redo.numel(), FLAGS),)](
        *outputs, *tensors, *places, redo, places[1].shape[0] - 1, redo.shape[0], *strides, scale,
        FLAGS=FLAGS, COLUMNS=COLUMNS, **constants(tensors[0], tensors[1], places, kv_heads, page),
        **SHAPE, enable_fp_fusion=False, **DEPENDENT,
    )  # fmt: skip
