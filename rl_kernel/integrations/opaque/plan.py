"""A counting plan whose functions are torch operators, for models that are compiled or captured in CUDA graphs."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rl_kernel.errors import PlanError
from rl_kernel.integrations.evidence import CountingPlan, Tally
from rl_kernel.integrations.opaque import library
from rl_kernel.plan import Plan

_OPS: Final = torch.ops.rl_kernel


class OpaquePlan(CountingPlan):
    """Hands out operators where the library has one, else the function itself (for code that is never compiled).

    The last plan made for an engine, a device and a contract serves their operators: one strict engine a process.
    group: of torch; its ranks meet in tree_all_reduce. in_pieces: whether a pass is now captured piece by piece, each
    a graph of its own, rather than whole.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        engine: str,
        rank: int = 0,
        tally: Tally | None = None,
        group: Any = None,
        in_pieces: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(plan, engine=engine, rank=rank, tally=tally)
        self._in_pieces = in_pieces
        self.key = f"{engine}/{plan.device}/{plan.contract.digest()[:16]}"
        self._group = group
        self._served: dict[str, Callable[..., Any]] = {}
        library.bind(self.key, self)

    def function(self, op: str, name: str | None = None) -> Callable[..., Any]:
        """As `CountingPlan.function`; an operator takes a plain weight, never a packed one."""
        name = name or op
        counted = super().function(op, name)
        if name not in _CALLERS:
            return counted
        self._served.setdefault(name, counted)
        return _CALLERS[name](self.key)

    def serve(self, name: str) -> Callable[..., Any]:
        """The counted function behind operator `name`; PlanError if nothing was built with it."""
        try:
            return self._served[name]
        except KeyError:
            raise PlanError(f"no layer of this engine was built with {name}, but compiled code calls it") from None

    def seal(self, *, last: bool) -> None:
        """Count what a CUDA graph holds so far, where one ends: with the pass, or with each of its pieces."""
        if self._tally is not None and self._tally.recording() and (last or self._in_pieces()):
            self._tally.seal()

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum fp32 `partial` over the ranks of the plan's group → bf16."""
        total: Tensor = self.serve("tree_all_reduce")(partial, self._group, torch.bfloat16)
        return total


def _embedding(key: str) -> Callable[..., Any]:
    return lambda ids, w: _OPS.embedding(ids, w, key)


def _gemm(key: str) -> Callable[..., Any]:
    def call(x: Tensor, w: Tensor, *, segments: int = 1, out_dtype: torch.dtype = torch.bfloat16) -> Any:
        return _OPS.gemm(x, w, segments, out_dtype is torch.float32, key)

    return call


def _rms_norm(key: str) -> Callable[..., Any]:
    return lambda x, w, eps: _OPS.rms_norm(x, w, eps, key)


def _add_rms_norm(key: str) -> Callable[..., Any]:
    return lambda x, residual, w, eps, seal=False: _OPS.add_rms_norm(x, residual, w, eps, seal, key)


def _rope(key: str) -> Callable[..., Any]:
    return lambda x, cos, sin, positions, seal=False: _OPS.rope(x, cos, sin, positions, seal, key)


def _rope_pair(key: str) -> Callable[..., Any]:
    return lambda q, k, cos, sin, positions, seal=False: _OPS.rope_pair(q, k, cos, sin, positions, seal, key)


def _swiglu(key: str) -> Callable[..., Any]:
    return lambda x: _OPS.swiglu(x, key)


def _tree_all_reduce(key: str) -> Callable[..., Any]:
    return lambda partial, group, out_dtype: _OPS.tree_all_reduce(partial, key)


_CALLERS: Final[dict[str, Callable[[str], Callable[..., Any]]]] = {
    "embedding": _embedding,
    "gemm": _gemm,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rope": _rope,
    "rope_pair": _rope_pair,
    "swiglu": _swiglu,
    "tree_all_reduce": _tree_all_reduce,
}
