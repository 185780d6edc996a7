"""SwiGLU on GPUs: T tokens, I features; x[T,2I] holds gate, then up."""

import torch
import triton
import triton.language as tl

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import EX2, cdiv, require
from rl_kernel.ops.triton_hopper import HOPPER, begin
from rl_kernel.ops.triton_scalar import narrow, sigmoid


@triton.jit
def swiglu_kernel(y, x, n, BLOCK: tl.constexpr, EX2: tl.constexpr, HOPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program computes BLOCK features of one token."""
    begin(HOPPER)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < n
    gate = tl.load(x + token * 2 * n + i, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * n + n + i, mask=here, other=0.0).to(tl.float32)
    tl.store(y + token * n + i, narrow((gate * sigmoid(gate, EX2, HOPPER)) * up), mask=here)


@triton.jit
def swiglu_backward_kernel(dx, dy, x, n, BLOCK: tl.constexpr, EX2: tl.constexpr, HOPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program computes the gradients of BLOCK gates and ups of one token."""
    begin(HOPPER)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < n
    gate = tl.load(x + token * 2 * n + i, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * n + n + i, mask=here, other=0.0).to(tl.float32)
    d = tl.load(dy + token * n + i, mask=here, other=0.0).to(tl.float32)
    s = sigmoid(gate, EX2, False)
    slope = s * tl.fma(gate, 1.0 - s, tl.full(gate.shape, 1.0, tl.float32))
    tl.store(dx + token * 2 * n + i, narrow((d * up) * slope), mask=here)
    tl.store(dx + token * 2 * n + n + i, narrow(d * (gate * s)), mask=here)


def _features(op: str, x: torch.Tensor) -> tuple[int, int]:
    require(op, "x", x, torch.bfloat16, None, None)
    if x.shape[1] % 2:
        raise ShapeError(f"{op}: x has {x.shape[1]} columns; gate and up need an even number")
    return x.shape[0], x.shape[1] // 2


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x[T,2I] bf16 → y[T,I] bf16."""
    tokens, n = _features("swiglu", x)
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    if y.numel():
        swiglu_kernel[(tokens, cdiv(n, 1024))](
            y, x, n, BLOCK=1024, EX2=EX2, num_warps=4, enable_fp_fusion=False, **HOPPER
        )
    return y


def swiglu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy[T,I], x[T,2I] bf16 → dx[T,2I] bf16."""
    tokens, n = _features("swiglu_backward", x)
    require("swiglu_backward", "dy", dy, torch.bfloat16, tokens, n)
    dx = torch.empty_like(x)
    if dy.numel():
        swiglu_backward_kernel[(tokens, cdiv(n, 1024))](
            dx, dy, x, n, BLOCK=1024, EX2=EX2, num_warps=4, enable_fp_fusion=False, **HOPPER
        )
    return dx
