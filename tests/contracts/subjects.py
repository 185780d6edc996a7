"""What the laws are checked on: the reference and every backend, behind one NumPy interface.

A backend added to an op's table is picked up here; it adds no test code. `Subject` has the methods of
`rl_kernel.reference.ops.Reference` and its module functions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rl_kernel.contract import PROFILES
from rl_kernel.contracts import model_contract
from rl_kernel.ops import strict_plan
from rl_kernel.plan import Plan
from rl_kernel.reference import ops as law
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference


class ReferenceSubject:
    """The reference itself."""

    def __init__(self, profile: str = "portable") -> None:
        self.name = f"reference-{profile}"
        self.law = Reference.of(model_contract(profile))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(self.law, name) if hasattr(self.law, name) else getattr(law, name)


class BackendSubject:
    """The backends of one plan, called with NumPy arrays."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.name = f"{plan.device}-{plan.contract.profile.name}"

    def _call(self, op: str, function: str, *args: Any, **kwargs: Any) -> Any:
        send = lambda value: to_torch(value, self.plan.device)  # noqa: E731
        result = self.plan.resolve(op).function(function)(
            *map(send, args), **{key: send(value) for key, value in kwargs.items()}
        )
        return tuple(map(to_numpy, result)) if isinstance(result, tuple) else to_numpy(result)

    def _accumulate(self, op: str, function: str, grad: F32, *args: Any, **kwargs: Any) -> Any:
        target = to_torch(grad.copy(), self.plan.device)
        result = self._call(op, function, *(target if a is grad else a for a in args), **kwargs)
        return result, to_numpy(target)

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        return self._call("gemm", "gemm", x, w, segments=segments, out_dtype=torch.bfloat16)

    def gemm_packed(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """The same through a prepacked weight, which is how an engine calls it."""
        packed = self.plan.resolve("gemm").function("pack")(to_torch(w, self.plan.device))
        return self._call("gemm", "gemm", x, packed, segments=segments, out_dtype=torch.bfloat16)

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        return self._call("gemm", "gemm", x, w, segments=segments, out_dtype=torch.float32)

    def gemm_dx(self, dy: Bits, w: Bits, *, segments: int = 1) -> Bits:
        return self._call("gemm", "gemm_dx", dy, w, segments=segments, out_dtype=torch.bfloat16)

    def gemm_dx_fp32(self, dy: Bits, w: Bits, *, segments: int = 1) -> F32:
        return self._call("gemm", "gemm_dx", dy, w, segments=segments, out_dtype=torch.float32)

    def gemm_dw(self, main_grad: F32, dy: Bits, x: Bits) -> F32:
        return self._accumulate("gemm", "gemm_dw_", main_grad, main_grad, dy, x)[1]

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        return self._call("rms_norm", "rms_norm", x, w, eps)

    def add_rms_norm(self, x: Bits, residual: Bits, w: Bits, eps: float) -> tuple[Bits, Bits]:
        return self._call("rms_norm", "add_rms_norm", x, residual, w, eps)

    def rms_norm_backward(self, dy: Bits, x: Bits, w: Bits, eps: float, dw: F32) -> tuple[Bits, F32]:
        return self._accumulate("rms_norm", "rms_norm_backward", dw, dy, x, w, eps, dw)

    def residual_add(self, a: Bits, b: Bits) -> Bits:
        return self._call("residual_add", "residual_add", a, b)

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        return self._call("rope", "rope_backward" if inverse else "rope", x, cos, sin, positions)

    def swiglu(self, x: Bits) -> Bits:
        return self._call("swiglu", "swiglu", x)

    def swiglu_backward(self, dy: Bits, x: Bits) -> Bits:
        return self._call("swiglu", "swiglu_backward", dy, x)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        return self._call("attention", "attention", q, k, v, cu_q, cu_k)

    def paged_attention(self, *args: Any) -> Bits:
        return self._call("attention", "paged_attention", *args)

    def attention_backward(self, *args: Any) -> tuple[Bits, Bits, Bits]:
        return self._call("attention", "attention_backward", *args)

    def vocab_stats(self, logits: F32, temperature: F32, *, vocab_start: int, vocab: int) -> tuple[F32, F32]:
        return self._call("linear_logp", "vocab_stats", logits, temperature, vocab_start=vocab_start, vocab=vocab)

    def merge_vocab_stats(self, m: F32, s: F32) -> F32:
        return self._call("linear_logp", "merge_vocab_stats", m, s)

    def logp_from_logits(self, logits: F32, ids: I64, temperature: F32, *, vocab: int) -> tuple[F32, F32]:
        return self._call("linear_logp", "logp_from_logits", logits, ids, temperature, vocab=vocab)

    def linear_logp(self, h: Bits, w: Bits, target: I64, *, temperature: float, vocab: int) -> tuple[F32, F32]:
        return self._call("linear_logp", "linear_logp", h, w, target, temperature=temperature, vocab=vocab)

    def linear_logp_backward(
        self, dlogp: F32, h: Bits, w: Bits, target: I64, lse: F32, main_grad: F32, **kwargs: Any
    ) -> tuple[Bits, F32]:
        grad = to_torch(main_grad.copy(), self.plan.device)
        dh = self._call(
            "linear_logp", "linear_logp_backward", dlogp, h, w, target, lse, main_grad=grad, **kwargs
        )  # fmt: skip
        return dh, to_numpy(grad)

    def embedding(self, ids: I64, w: Bits) -> Bits:
        return self._call("embedding", "embedding", ids, w)

    def embedding_dw(self, main_grad: F32, dy: Bits, ids: I64) -> F32:
        return self._accumulate("embedding", "embedding_dw_", main_grad, main_grad, dy, ids)[1]

    def tree_sum(self, parts: F32) -> F32:
        return self._call("tree_all_reduce", "tree_sum", parts, torch.float32)


def to_torch(value: Any, device: str) -> Any:
    """uint16 arrays become bf16 tensors of the same bits; what is no array passes through."""
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(np.ascontiguousarray(value).copy())
    tensor = tensor.view(torch.bfloat16) if value.dtype == np.uint16 else tensor
    return tensor.to("cuda" if device in ("cuda", "rocm") else device)


def to_numpy(value: Any) -> Any:
    """The reverse of `to_torch`."""
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().cpu().contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def backends() -> list[BackendSubject]:
    """Every plan that can be built for a device of this machine: CPU always, CUDA or ROCm where there is a GPU."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("rocm" if torch.version.hip else "cuda")
    found = []
    for device in devices:
        for profile in PROFILES:
            contract = model_contract(profile)
            try:
                found.append(BackendSubject(strict_plan(contract, device)))
            except LookupError:  # no backend claims this profile on this device
                continue
    assert any(s.plan.device == "cpu" for s in found), "no CPU backend: the laws would check nothing"
    return found
