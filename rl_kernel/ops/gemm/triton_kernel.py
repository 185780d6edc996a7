"""GEMM on GPUs in Triton: y = x Wᵀ and its gradients, with the tree over `segments` inside the kernel.

M rows, N and K features, T tokens.
"""

import torch

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import BF16, F32, PackedWeight, held, pack, require, require_rows
from rl_kernel.ops.triton_matmul import product

__all__ = ["PackedWeight", "gemm", "gemm_dw_", "gemm_dx", "pack"]


def checked(
    op: str, x: torch.Tensor, w: torch.Tensor | PackedWeight, axis: int, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (w, empty result) of x[M,·] against w[N,K] summed over w's `axis`; ShapeError where they do not fit."""
    weight = held(op, w)
    require_rows(op, "x" if axis == 1 else "dy", x, None, weight.shape[axis])
    if out_dtype not in (BF16, F32):
        raise ShapeError(f"{op}: out_dtype {out_dtype}; the contract has torch.bfloat16 and torch.float32")
    return weight, torch.empty((x.shape[0], weight.shape[1 - axis]), dtype=out_dtype, device=x.device)


def gemm(
    x: torch.Tensor, w: torch.Tensor | PackedWeight, *, segments: int = 1, out_dtype: torch.dtype = BF16
) -> torch.Tensor:
    """x[M,K], w[N,K] bf16 → y[M,N] in out_dtype (bf16 or fp32)."""
    weight, y = checked("gemm", x, w, 1, out_dtype)
    return product(y, x, weight.t(), segments=segments)


def gemm_dx(
    dy: torch.Tensor, w: torch.Tensor | PackedWeight, *, segments: int = 1, out_dtype: torch.dtype = BF16
) -> torch.Tensor:
    """dy[M,N], w[N,K] bf16 → dx[M,K] in out_dtype; the chain runs along N, cut in `segments`."""
    weight, dx = checked("gemm_dx", dy, w, 0, out_dtype)
    return product(dx, dy, weight, segments=segments)


def gemm_dw_(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """main_grad[N,K] fp32 <- its chain continued by dy[T,N]ᵀ x[T,K] (bf16), in place, tokens in order; returns it."""
    require("gemm_dw_", "main_grad", main_grad, F32, None, None)
    require_rows("gemm_dw_", "dy", dy, None, main_grad.shape[0])
    require_rows("gemm_dw_", "x", x, dy.shape[0], main_grad.shape[1])
    if dy.shape[0]:
        product(main_grad, dy.t(), x, segments=1, keep=True)
    return main_grad
