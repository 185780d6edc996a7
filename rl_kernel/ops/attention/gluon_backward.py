"""The two walks of attention's gradients on Hopper: `gluon_dq` over the keys, `gluon_dkdv` over the queries."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_kernel.ops.accelerator import cdiv
from rl_kernel.ops.attention.gluon_dkdv import dkdv_kernel
from rl_kernel.ops.attention.gluon_dq import dq_kernel
from rl_kernel.ops.attention.triton_blocks import width_for

HEAD_DIMS = (64, 128)
STAGES = {64: 6, 128: 4}  # pairs of blocks on their way, as many as shared memory holds at 128
TILE, BLOCK = 128, 64
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # dout, q, k, v


def serves(inputs: Inputs) -> bool:
    """Whether the bulk copy engine can read them: 16 bytes from row to row and from the beginning, and no row over
    another, as in an expanded tensor; and whether head_dim has a kernel here.
    """
    apart = all(_stride(x) % 8 == 0 and _stride(x) >= x.shape[1] * x.shape[2] for x in inputs)
    return apart and all(x.data_ptr() % 16 == 0 for x in inputs) and inputs[1].shape[2] in HEAD_DIMS


def walk(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, inputs: Inputs, terms: torch.Tensor, cu: torch.Tensor,
    score_scale: float, scale: float,
) -> None:  # fmt: skip
    """Fill dq[T,H,D], and dk and dv[T,H,D] fp32 of each query head, unscaled; see `serves`. terms[3,H,T] fp32."""
    tokens, heads, dim = inputs[1].shape
    sequences = cu.shape[0] - 1
    tiles = cdiv(tokens, TILE) if sequences == 1 else tokens // TILE + sequences
    how = {
        "HEADS": heads, "KV_HEADS": inputs[2].shape[1], "D": dim, "STAGES": STAGES[dim],
        "WIDTH": 1 if sequences == 1 else width_for(sequences), "num_warps": 4, "enable_fp_fusion": False,
    }  # fmt: skip
    tile, block = (tuple(_rows(x, rows) for x in inputs) for rows in (TILE, BLOCK))
    dq_kernel[(heads, tiles)](
        dq, *tile[:2], *block[2:], terms, cu, sequences, tokens, score_scale, scale, **how
    )  # fmt: skip
    dkdv_kernel[(heads, tiles)](dk, dv, *block[:2], *tile[2:], terms, cu, sequences, tokens, score_scale, **how)


def _stride(x: torch.Tensor) -> int:
    """Elements from token to token; of one token the stride says nothing (see `require_rows`)."""
    return int(x.stride(0)) if x.shape[0] > 1 else x.shape[1] * x.shape[2]


def _rows(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """x[T,heads,D] as a matrix that is read `rows` rows of one head at a time."""
    tokens, heads, dim = x.shape
    layout = gl.NVMMASharedLayout.get_default_for([rows, dim], gl.bfloat16)
    return TensorDescriptor(x, [tokens, heads * dim], [_stride(x), 1], [rows, dim], layout)
