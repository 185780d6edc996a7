"""Larger inputs than the laws use: they cross the CPU backend's own blocks (96 rows, 640 deep, 2^20 logits)."""

from collections.abc import Callable

import torch

from rl_kernel.ops.attention import cpu as attention
from rl_kernel.ops.gemm import cpu as gemm
from rl_kernel.ops.linear_logp import cpu as linear_logp
from rl_kernel.ops.rms_norm import cpu as rms_norm
from rl_kernel.ops.swiglu import cpu as swiglu

Results = tuple[torch.Tensor, ...]


def draw(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Draw N(0, scale²) as bf16."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def _gemm() -> Results:
    x, w, dy = draw(1, 131, 1100), draw(2, 500, 1100), draw(3, 131, 500)
    return (
        gemm.gemm(x, w, out_dtype=torch.float32),
        gemm.gemm(x[:1], w),
        gemm.gemm(x[:7], w, segments=4),
        gemm.gemm_dx(dy, w, segments=2),
        gemm.gemm_dw_(torch.ones(500, 1100), dy, x),
    )


def _attention() -> Results:
    q, k, v, dout = draw(1, 300, 6, 64), draw(2, 300, 2, 64), draw(3, 300, 2, 64), draw(4, 300, 6, 64)
    cu = torch.tensor([0, 20, 20, 300], dtype=torch.int32)
    out, m, l = attention.attention(q, k, v, cu, cu)
    return (out, m, l, *attention.attention_backward(dout, q, k, v, out, m, l, cu))


def _linear_logp() -> Results:
    h, w, target = draw(1, 1400, 16), draw(2, 1700, 16), torch.arange(1400)
    how = {"temperature": 0.8, "vocab": 1650}
    logp, lse = linear_logp.linear_logp(h, w, target, **how)
    grad = torch.zeros(1700, 16)
    dh = linear_logp.linear_logp_backward(logp, h, w, target, lse, main_grad=grad, segments=2, **how)
    return logp, lse, dh, grad


def _rows() -> Results:
    x, dy, w, dw = draw(1, 400, 576), draw(2, 400, 576), draw(3, 576), torch.zeros(1, 576)
    return (
        rms_norm.rms_norm(x, w, 1e-5),
        *rms_norm.add_rms_norm(x, dy, w, 1e-5),
        rms_norm.rms_norm_backward(dy, x, w, 1e-5, dw),
        dw,
        swiglu.swiglu(x),
        swiglu.swiglu_backward(dy[:, :288].contiguous(), x),
    )


LARGE: dict[str, Callable[[], Results]] = {
    "gemm": _gemm,
    "attention": _attention,
    "linear_logp": _linear_logp,
    "rows": _rows,
}


def same_bits(left: Results, right: Results) -> bool:
    """Whether all tensors agree bit for bit; False if there are none."""
    words = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    return len(left) == len(right) > 0 and all(
        torch.equal(a.view(words[a.dtype]), b.view(words[b.dtype])) for a, b in zip(left, right, strict=True)
    )
