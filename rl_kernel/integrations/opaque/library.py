"""The operators `torch.ops.rl_kernel.*`: schemas, what they compute and the shapes that a compiler may assume.

None changes its arguments or returns one of them. Each ends with the key of the plan that serves it: a compiled graph
keeps the key, not the plan, so that code compiled in one process finds the right backends in another, or none.
`seal` marks the last op of a piece that may become a CUDA graph of its own (see `graph_tally`): RoPE of the keys comes
before attention, where pieces are cut, and the model's last norm ends the pass.

T tokens, N and K features, H heads, D head_dim, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from rl_kernel.errors import PlanError

BF16, F32 = torch.bfloat16, torch.float32


class Served(Protocol):
    """What a plan answers when an operator runs."""

    def serve(self, name: str) -> Callable[..., Any]:
        """The plan's function `name`, counted."""

    def seal(self, *, last: bool) -> None:
        """A piece may end here; at the last seal the whole pass ends."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum over the plan's ranks."""


_PLANS: Final[dict[str, Served]] = {}
_LIBRARY: Final = torch.library.Library("rl_kernel", "DEF")


def bind(key: str, plan: Served) -> None:
    """Let operators with this key be served by `plan` from now on."""
    _PLANS[key] = plan


def _plan(key: str) -> Served:
    try:
        return _PLANS[key]
    except KeyError:
        raise PlanError(f"compiled code asks for plan {key!r}, and this process has none of that name") from None


def _embedding(ids: Tensor, w: Tensor, plan: str) -> Tensor:
    """ids[T] int64 or int32, w[V,K] bf16 → [T,K] bf16."""
    rows: Tensor = _plan(plan).serve("embedding")(ids.long(), w)
    return rows


def _gemm(x: Tensor, w: Tensor, segments: int, fp32: bool, plan: str) -> Tensor:
    """x[T,K], w[N,K] bf16 → [T,N] bf16, or fp32."""
    y: Tensor = _plan(plan).serve("gemm")(x, w, segments=segments, out_dtype=F32 if fp32 else BF16)
    return y


def _rms_norm(x: Tensor, w: Tensor, eps: float, plan: str) -> Tensor:
    """x[…,K] → y[…,K], contiguous."""
    y: Tensor = _plan(plan).serve("rms_norm")(x, w, eps)
    return y


def _add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float, seal: bool, plan: str) -> tuple[Tensor, Tensor]:
    """x, residual[T,K] → (y, new residual)."""
    served = _plan(plan)
    y, total = served.serve("add_rms_norm")(x, residual, w, eps)
    if seal:
        served.seal(last=True)
    return y, total


def _rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, seal: bool, plan: str) -> Tensor:
    """x[T,H,D], tables fp32 [P,D/2], positions[T] int64 → [T,H,D]."""
    served = _plan(plan)
    y: Tensor = served.serve("rope")(x, cos, sin, positions)
    if seal:
        served.seal(last=False)
    return y


def _rope_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, seal: bool, plan: str
) -> tuple[Tensor, Tensor]:
    """q[T,H,D], k[T,G,D] → both rotated."""
    served = _plan(plan)
    rotated_q, rotated_k = served.serve("rope_pair")(q, k, cos, sin, positions)
    if seal:
        served.seal(last=False)
    return rotated_q, rotated_k


def _swiglu(x: Tensor, plan: str) -> Tensor:
    """x[T,2K] → [T,K]."""
    y: Tensor = _plan(plan).serve("swiglu")(x)
    return y


def _tree_all_reduce(partial: Tensor, plan: str) -> Tensor:
    """fp32 partial of every rank of the plan's group → bf16 sum."""
    return _plan(plan).all_reduce(partial)


def _define(schema: str, run: Callable[..., Any], shape: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rl_kernel::{name}", shape, lib=_LIBRARY)


_define(
    "embedding(Tensor ids, Tensor w, str plan) -> Tensor",
    _embedding,
    lambda ids, w, plan: w.new_empty((ids.shape[0], w.shape[1])),
)
_define(
    "gemm(Tensor x, Tensor w, int segments, bool fp32, str plan) -> Tensor",
    _gemm,
    lambda x, w, segments, fp32, plan: x.new_empty((x.shape[0], w.shape[0]), dtype=F32 if fp32 else BF16),
)
_define(
    "rms_norm(Tensor x, Tensor w, float eps, str plan) -> Tensor",
    _rms_norm,
    lambda x, w, eps, plan: x.new_empty(x.shape),
)
_define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor w, float eps, bool seal, str plan) -> (Tensor, Tensor)",
    _add_rms_norm,
    lambda x, residual, w, eps, seal, plan: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
_define(
    "rope(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool seal, str plan) -> Tensor",
    _rope,
    lambda x, cos, sin, positions, seal, plan: x.new_empty(x.shape),
)
_define(
    "rope_pair(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor positions, bool seal, str plan) -> (Tensor, Tensor)",
    _rope_pair,
    lambda q, k, cos, sin, positions, seal, plan: (q.new_empty(q.shape), k.new_empty(k.shape)),
)
_define(
    "swiglu(Tensor x, str plan) -> Tensor",
    _swiglu,
    lambda x, plan: x.new_empty((x.shape[0], x.shape[1] // 2)),
)
_define(
    "tree_all_reduce(Tensor partial, str plan) -> Tensor",
    _tree_all_reduce,
    lambda partial, plan: partial.new_empty(partial.shape, dtype=BF16),
)
