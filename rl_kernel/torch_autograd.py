"""The strict ops as differentiable torch functions, bound to the backends of one plan and to one tensor-parallel rank.

The gradient of a weight never travels through autograd: backward continues the fp32 chain in `weight.main_grad`,
so that a batch cut into micro-batches gives the bits of the whole batch. What does travel (activations) is bf16.
Where two paths meet (a residual branch) autograd adds them: one bf16 addition, the contract's `residual_add`.

T rows, K and N features, H query heads, G kv heads, D head_dim, V vocabulary, R sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Find = Callable[[str, str], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The process's place among the ranks that share one model. group: None where there is one rank."""

    rank: int = 0
    size: int = 1
    group: torch.distributed.ProcessGroup | None = None


class StrictOps:
    """The functions of one plan. `find(op, name)` hands them out (`CountingPlan.function` counts their calls).

    segments: of this rank's share of a sum that is cut over ranks; the contract's segments by the TP size.
    """

    def __init__(self, find: Find, segments: int, tp: TensorParallel) -> None:
        self.tp = tp
        self.segments = segments // tp.size
        self.gemm, self.gemm_dx, self.gemm_dw_ = (find("gemm", n) for n in ("gemm", "gemm_dx", "gemm_dw_"))
        self.rms_norm, self.rms_norm_backward = (find("rms_norm", n) for n in ("rms_norm", "rms_norm_backward"))
        self.rope, self.rope_backward = find("rope", "rope"), find("rope", "rope_backward")
        self.swiglu, self.swiglu_backward = find("swiglu", "swiglu"), find("swiglu", "swiglu_backward")
        self.attention, self.attention_backward = (find("attention", n) for n in ("attention", "attention_backward"))
        self.residual_add = find("residual_add", "residual_add")
        self.embedding, self.embedding_dw_ = find("embedding", "embedding"), find("embedding", "embedding_dw_")
        self.tree_sum = find("tree_all_reduce", "tree_sum")
        self.tree_all_reduce = find("tree_all_reduce", "tree_all_reduce")

    def column_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x[T,K] bf16, weight[N/t,K] → y[T,N/t]: rows of the weight are cut over ranks; backward sums dx over them."""
        return _apply(_ColumnLinear, x, weight, self)

    def row_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x[T,K/t] bf16, weight[N,K/t] → y[T,N]: columns are cut over ranks, and y is summed over them."""
        return _apply(_RowLinear, x, weight, self)

    def norm(self, x: Tensor, weight: Tensor, eps: float, dw: Tensor | None) -> Tensor:
        """RMSNorm of x[T,n]. dw: fp32 [G,n], gets row r's weight gradient in row r % G; None if never trained."""
        return _apply(_RmsNorm, x, weight, eps, dw, self)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """bf16 sum of two tensors of one shape."""
        return _apply(_ResidualAdd, a, b, self)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        """RoPE of x[T,H,D] by the rows `positions`[T] of the table cos, sin fp32 [P,D/2]."""
        return _apply(_Rope, x, cos, sin, positions, self)

    def swiglu_activation(self, x: Tensor) -> Tensor:
        """x[T,2I] = gate, up → silu(gate)·up [T,I]."""
        return _apply(_SwiGlu, x, self)

    def self_attention(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        """Causal attention of R packed sequences: q[T,H,D], k and v[T,G,D], offsets cu[R+1] int32 → [T,H,D]."""
        return _apply(_Attention, q, k, v, cu, self)

    def sum_over_ranks(self, product: Callable[..., Tensor], a: Tensor, w: Tensor) -> Tensor:
        """A GEMM whose summed dimension is cut over ranks, in segments: bf16, the same bits at every TP size."""
        if self.tp.size == 1:
            return product(a, w, segments=self.segments)
        partial = product(a, w, segments=self.segments, out_dtype=torch.float32)
        summed: Tensor = self.tree_all_reduce(partial, self.tp.group, torch.bfloat16)
        return summed


def split_qkv(qkv: Tensor, groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv[T, G·(H/G+2)·D], kv group by kv group as Megatron keeps it → q[T,H,D], k[T,G,D], v[T,G,D]. Copies only."""
    q, k, v = _SplitQkv.apply(qkv, groups, head_dim)
    return q, k, v


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


class _ColumnLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ops: StrictOps) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ops, ctx.main_grad = ops, getattr(weight, "main_grad", None)
        y: Tensor = ops.gemm(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        ctx.ops.gemm_dw_(ctx.main_grad, dy, x)
        return ctx.ops.sum_over_ranks(ctx.ops.gemm_dx, dy, weight), None, None


class _RowLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ops: StrictOps) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ops, ctx.main_grad = ops, getattr(weight, "main_grad", None)
        return ops.sum_over_ranks(ops.gemm, x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        ctx.ops.gemm_dw_(ctx.main_grad, dy, x)
        return ctx.ops.gemm_dx(dy, weight), None, None


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dw: Tensor | None, ops: StrictOps) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ops, ctx.eps, ctx.dw = ops, eps, dw
        y: Tensor = ops.rms_norm(x, weight, eps)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        return ctx.ops.rms_norm_backward(dy.contiguous(), x, weight, ctx.eps, ctx.dw), None, None, None, None


class _ResidualAdd(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, ops: StrictOps) -> Tensor:
        y: Tensor = ops.residual_add(a, b)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return dy, dy, None


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, ops: StrictOps) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.ops = ops
        y: Tensor = ops.rope(x, cos, sin, positions)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.ops.rope_backward(dy.contiguous(), *ctx.saved_tensors), None, None, None, None


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ops: StrictOps) -> Tensor:
        ctx.save_for_backward(x)
        ctx.ops = ops
        y: Tensor = ops.swiglu(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.ops.swiglu_backward(dy.contiguous(), x), None


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, ops: StrictOps) -> Tensor:
        out, m, l = ops.attention(q, k, v, cu, cu)
        ctx.save_for_backward(q, k, v, out, m, l, cu)
        ctx.ops = ops
        attended: Tensor = out
        return attended

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        dq, dk, dv = ctx.ops.attention_backward(dout.contiguous(), *ctx.saved_tensors)
        return dq, dk, dv, None, None


class _SplitQkv(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(qkv.shape[0], groups, -1, head_dim)
        ctx.groups, ctx.shape = groups, qkv.shape
        q = heads[:, :, :-2].reshape(qkv.shape[0], -1, head_dim)
        return q, heads[:, :, -2].contiguous(), heads[:, :, -1].contiguous()

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None]:
        rows, groups, head_dim = ctx.shape[0], ctx.groups, dk.shape[-1]
        per_group = (dq.view(rows, groups, -1, head_dim), dk.unsqueeze(2), dv.unsqueeze(2))
        return torch.cat(per_group, dim=2).view(ctx.shape), None, None
