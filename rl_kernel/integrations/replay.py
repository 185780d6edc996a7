"""The ops that our engines run, in the shape of the reference: NumPy arrays in, NumPy arrays out, one sequence a call.

`auditor.replay` runs a frozen sample on them, call by call beside the reference. `strict` is what both engines run
under a contract; `native` is what a stock Megatron-core model (local spec, bf16, CPU) runs, with torch's own kernels;
what a stock vLLM runs is in `replay_vllm`.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from rl_kernel.contract import ModelContract
from rl_kernel.ops import strict_plan
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference

_MASKED: Final = -10000.0  # Megatron's score of a key that is not seen


class StrictOps(Reference):
    """The CPU backends that the plan of a contract chooses."""

    __slots__ = ("_functions",)

    _functions: Mapping[str, Callable[..., Any]]

    @classmethod
    def under(cls, contract: ModelContract) -> "StrictOps":
        """PlanError where this machine's CPU serves the contract in some op not at all."""
        plan = strict_plan(contract, "cpu")
        names = ("gemm", "rms_norm", "rope", "attention", "residual_add", "swiglu", "linear_logp", "logp_from_logits")
        ops = cls(**settings_of(Reference.of(contract)))
        owners = {"logp_from_logits": "linear_logp"}
        functions = {name: plan.resolve(owners.get(name, name)).function(name) for name in names}
        object.__setattr__(ops, "_functions", functions)
        return ops

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """x[M,K], w[N,K] → bf16 [M,N]."""
        return as_bits(self._functions["gemm"](as_bf16(x), as_bf16(w), segments=segments))

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        """x[M,K], w[N,K] → fp32 [M,N]."""
        return as_floats(self._functions["gemm"](as_bf16(x), as_bf16(w), segments=segments, out_dtype=torch.float32))

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """x[…,n], w[n] → y[…,n]."""
        return as_bits(self._functions["rms_norm"](as_bf16(x), as_bf16(w), eps))

    def residual_add(self, a: Bits, b: Bits) -> Bits:
        """bf16 sum of two arrays of one shape."""
        return as_bits(self._functions["residual_add"](as_bf16(a), as_bf16(b)))

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """x[T,H,D], cos and sin[P,D/2], positions[T] → x rotated."""
        assert not inverse, "a replay has no gradients"
        return as_bits(self._functions["rope"](as_bf16(x), as_tensor(cos), as_tensor(sin), as_tensor(positions)))

    def swiglu(self, x: Bits) -> Bits:
        """x[T,2I] = gate, up → y[T,I]."""
        return as_bits(self._functions["swiglu"](as_bf16(x)))

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """q[T,H,D], k and v[T',G,D], offsets[R+1] → out[T,H,D], running maximum and row sum [T,H]."""
        out, m, l = self._functions["attention"](as_bf16(q), as_bf16(k), as_bf16(v), as_tensor(cu_q), as_tensor(cu_k))
        return as_bits(out), as_floats(m), as_floats(l)

    def linear_logp(self, h: Bits, w: Bits, target: I64, *, temperature: float, vocab: int) -> tuple[F32, F32]:
        """h[T,K], w[V,K], target[T] → logp[T], lse[T]."""
        head, ids = as_bf16(w), as_tensor(target)
        logp, lse = self._functions["linear_logp"](as_bf16(h), head, ids, temperature=temperature, vocab=vocab)
        return as_floats(logp), as_floats(lse)

    def logp_from_logits(self, logits: F32, ids: I64, temperature: F32, *, vocab: int) -> tuple[F32, F32]:
        """logits[T,V], ids[T,J], temperature[T] → logp[T,J], lse[T]."""
        function = self._functions["logp_from_logits"]
        logp, lse = function(as_tensor(logits), as_tensor(ids), as_tensor(temperature), vocab=vocab)
        return as_floats(logp), as_floats(lse)


class NativeOps(Reference):
    """Megatron-core's local spec on a CPU, op by op, as its modules call torch. Holds to no contract."""

    __slots__ = ()

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As ColumnParallelLinear and RowParallelLinear on one rank; x[M,K], w[N,K] → bf16 [M,N]."""
        return as_bits(torch.matmul(as_bf16(x).unsqueeze(1), as_bf16(w).t()).squeeze(1))

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        """The output layer: bf16 logits, widened."""
        return as_floats(torch.matmul(as_bf16(x).unsqueeze(1), as_bf16(w).t()).squeeze(1).float())

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """As torch.nn.RMSNorm."""
        return as_bits(F.rms_norm(as_bf16(x), (w.shape[0],), as_bf16(w), eps))

    def residual_add(self, a: Bits, b: Bits) -> Bits:
        """As bias_dropout_add without bias and dropout."""
        return as_bits(as_bf16(b) + as_bf16(a))

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """As apply_rotary_pos_emb without fusion: cosine and sine rounded to bf16, products and sum in bf16."""
        assert not inverse, "a replay has no gradients"
        t = as_bf16(x)
        cos_, sin_ = (
            torch.cat([a, a], -1)[:, None].to(t.dtype) for a in (as_tensor(cos[positions]), as_tensor(sin[positions]))
        )
        first, second = t.chunk(2, -1)
        return as_bits(t * cos_ + torch.cat((-second, first), -1) * sin_)

    def swiglu(self, x: Bits) -> Bits:
        """As MLP with silu and a gated linear unit."""
        gate, up = as_bf16(x).chunk(2, -1)
        return as_bits(F.silu(gate) * up)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As DotProductAttention with a softmax in fp32, on one sequence; it has no row sums to give."""
        assert len(cu_q) == 2, "one sequence a call"
        query = as_bf16(q).transpose(0, 1)
        shared = q.shape[1] // k.shape[1]
        key, value = (as_bf16(a).repeat_interleave(shared, dim=1).transpose(0, 1) for a in (k, v))
        tokens = q.shape[0]
        scores = torch.baddbmm(
            torch.empty(q.shape[1], tokens, tokens, dtype=torch.bfloat16),
            query, key.transpose(1, 2), beta=0.0, alpha=float(q.shape[2]) ** -0.5,
        ).float()  # fmt: skip
        unseen = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        probabilities = torch.softmax(scores.masked_fill(unseen, _MASKED), dim=-1).to(torch.bfloat16)
        out = torch.bmm(probabilities, value).transpose(0, 1).contiguous()
        empty = np.zeros(q.shape[:2], np.float32)
        return as_bits(out), empty, empty

    def linear_logp(self, h: Bits, w: Bits, target: I64, *, temperature: float, vocab: int) -> tuple[F32, F32]:
        """As the output layer in bf16 and torch's log_softmax in fp32."""
        return self._read(as_tensor(self.gemm_fp32(h, w)), as_tensor(target).unsqueeze(1), temperature, vocab)

    def logp_from_logits(self, logits: F32, ids: I64, temperature: F32, *, vocab: int) -> tuple[F32, F32]:
        """logits[T,V], ids[T,J], temperature[T] → logp[T,J], lse[T]."""
        return self._read(as_tensor(logits), as_tensor(ids), as_tensor(temperature).unsqueeze(1), vocab)

    def _read(self, logits: Tensor, ids: Tensor, temperature: float | Tensor, vocab: int) -> tuple[F32, F32]:
        heated = logits[:, :vocab] / temperature
        values = torch.log_softmax(heated, dim=-1).gather(1, ids)
        return as_floats(values.squeeze(1)), as_floats(torch.logsumexp(heated, -1))


def strict(decoder: Decoder, prompt_len: int) -> StrictOps:
    """What both engines run under the decoder's contract; PlanError where this machine's CPU does not serve it."""
    return StrictOps.under(decoder.contract)


def native(decoder: Decoder, prompt_len: int) -> NativeOps:
    """What a stock Megatron-core runs, which reads a whole sequence at once."""
    return NativeOps(**settings_of(decoder.reference))


def settings_of(reference: Reference) -> dict[str, Any]:
    """Fields of a reference, to make another kind of one from."""
    return {field.name: getattr(reference, field.name) for field in fields(Reference)}


def as_bf16(bits: Bits) -> Tensor:
    """A copy as a tensor of bf16."""
    return torch.from_numpy(np.array(bits).view(np.int16)).view(torch.bfloat16)


def as_tensor(values: npt.NDArray[Any]) -> Tensor:
    """A copy as a tensor of the same type."""
    return torch.from_numpy(np.array(values))


def as_bits(x: Tensor) -> Bits:
    """A bf16 tensor's bit patterns."""
    found: Bits = x.contiguous().view(torch.int16).numpy().view(np.uint16)
    return found


def as_floats(x: Tensor) -> F32:
    """An fp32 tensor's values."""
    found: F32 = x.contiguous().numpy()
    return found
