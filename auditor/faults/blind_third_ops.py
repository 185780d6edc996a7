"""Broken ops of the judge's third list: the reference with one op, or all of them, as the faulty side has it."""

from dataclasses import dataclass, field

import numpy as np

from auditor.faults.ops import Kv, NativeProducts
from auditor.faults.reported import to_e4m3
from auditor.faults.world import from_bf16, to_bf16
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference


@dataclass(frozen=True, slots=True)
class PatchedKv(Reference):
    """Keys and values of some spans come from elsewhere, layer by layer; what each layer then reads is kept."""

    patches: tuple[tuple[int, int, tuple[Kv, ...]], ...] = ()
    kept: list[Kv] = field(default_factory=list)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        k, v = k.copy(), v.copy()
        for first, last, layers in self.patches:
            other_k, other_v = layers[len(self.kept)]
            k[first:last], v[first:last] = other_k[first:last], other_v[first:last]
        self.kept.append((k, v))
        return Reference.attention(self, q, k, v, cu_q, cu_k)


@dataclass(frozen=True, slots=True)
class EmptyBlock(Reference):
    """In one layer, a block of the cache was never written and holds zeros."""

    first: int = 0
    last: int = 0
    layer: int = 0
    at: list[int] = field(default_factory=lambda: [0])

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        self.at[0] += 1
        if self.at[0] - 1 == self.layer:
            k, v = k.copy(), v.copy()
            k[self.first : self.last], v[self.first : self.last] = 0, 0
        return Reference.attention(self, q, k, v, cu_q, cu_k)


@dataclass(frozen=True, slots=True)
class Fp8Decode(Reference):
    """Decoding reads keys and values from a cache in FP8 without a scale; the prompt's own pass does not."""

    prompt: int = 0

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        cut = self.prompt
        narrow_k, narrow_v = (to_bf16(to_e4m3(from_bf16(a))) for a in (k, v))
        out, m, l = Reference.attention(self, q, k, v, cu_q, cu_k)
        cached, cached_m, cached_l = Reference.attention(self, q, narrow_k, narrow_v, cu_q, cu_k)
        out[cut:], m[cut:], l[cut:] = cached[cut:], cached_m[cut:], cached_l[cut:]
        return out, m, l


@dataclass(frozen=True, slots=True)
class PromptBothWays(Reference):
    """Tokens of the prompt see the whole prompt, as in a prefix language model."""

    prompt: int = 0

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        out, m, l = Reference.attention(self, q, k, v, cu_q, cu_k)
        k, v = k[: self.prompt].copy(), v[: self.prompt].copy()
        one, every = np.array([0, 1], np.int32), np.array([0, self.prompt], np.int32)
        for i in range(self.prompt):
            here = slice(i, i + 1)
            out[here], m[here], l[here] = Reference.attention(self, q[here].copy(), k, v, one, every)
        return out, m, l


class NormInFp32(Reference):
    """A norm rounds to bf16 once, after its weights, and not before them as well."""

    __slots__ = ()

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """x[…,n], w[n] → y[…,n]."""
        return _norm_in_fp32(x, w, eps)


class EagerAttention(Reference):
    """Attention that writes its scores and its probabilities in bf16."""

    __slots__ = ()

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """Causal, on one sequence."""
        return _by_matrices(q, k, v, in_bf16=True)


class Native(NativeProducts):
    """Nothing keeps a contract: norms, attention, activation and softmax as NumPy and the local BLAS sum them."""

    __slots__ = ()

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """x[…,n], w[n] → y[…,n]."""
        return _norm_in_fp32(x, w, eps)

    def swiglu(self, x: Bits) -> Bits:
        """x[T,2I] → bf16 [T,I]."""
        half = x.shape[1] // 2
        gate, up = from_bf16(x[:, :half]), from_bf16(x[:, half:])
        return to_bf16(gate / (1 + np.exp(-gate)) * up)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """Causal, on one sequence."""
        return _by_matrices(q, k, v, in_bf16=False)

    def logp_from_logits(self, logits: F32, ids: I64, temperature: F32, *, vocab: int) -> tuple[F32, F32]:
        """logits[T,V], ids[T,J], temperature[T] → logp[T,J], lse[T]."""
        z = logits[:, :vocab] / temperature[:, None]
        lse = log_sum_exp(z)
        return np.take_along_axis(z, ids, axis=1) - lse[:, None], lse


def log_sum_exp(z: F32) -> F32:
    """z[T,V] → [T], fp32, a row at a time."""
    top = z.max(axis=1)
    total: F32 = top + np.log(np.exp(z - top[:, None]).sum(axis=1, dtype=np.float32))
    return total


def _norm_in_fp32(x: Bits, w: Bits, eps: float) -> Bits:
    wide = from_bf16(x)
    size = np.sqrt((wide * wide).mean(axis=-1, keepdims=True, dtype=np.float32) + np.float32(eps))
    return to_bf16(wide / size * from_bf16(w))


def _by_matrices(q: Bits, k: Bits, v: Bits, *, in_bf16: bool) -> tuple[Bits, F32, F32]:
    """Attention of one sequence as two products and a softmax between them."""
    out = np.empty_like(q)
    m, l = np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        keys, values = from_bf16(k[:, head // group]), from_bf16(v[:, head // group])
        scores = from_bf16(q[:, head]) @ keys.T
        if in_bf16:
            scores = from_bf16(to_bf16(scores))
        scores = scores * np.float32(q.shape[2] ** -0.5)
        if in_bf16:
            scores = from_bf16(to_bf16(scores))
        scores[np.triu_indices(len(q), 1)] = -np.inf
        m[:, head] = scores.max(axis=1)
        chances = np.exp(scores - m[:, head, None])
        l[:, head] = chances.sum(axis=1)
        chances /= l[:, head, None]
        if in_bf16:
            chances = from_bf16(to_bf16(chances))
        out[:, head] = to_bf16(chances @ values)
    return out, m, l
