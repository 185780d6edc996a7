"""Broken ops of the judge's fourth list: the reference with one op, or some of its rows, as the faulty side has it."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from auditor.faults.blind_third_ops import Native
from auditor.faults.ops import Kv
from auditor.faults.reported import to_e4m3
from auditor.faults.world import from_bf16, to_bf16
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference


@dataclass(frozen=True, slots=True)
class GivenAway(Reference):
    """A block of the cache is given to another sequence while this one runs: rows from `since` on read its keys."""

    foreign: tuple[Kv, ...] = ()
    last: int = 16
    since: int = 0
    at: list[int] = field(default_factory=lambda: [0])

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        out, m, l = Reference.attention(self, q, k, v, cu_q, cu_k)
        other_k, other_v = self.foreign[self.at[0]]
        self.at[0] += 1
        k, v = k.copy(), v.copy()
        k[: self.last], v[: self.last] = other_k[: self.last], other_v[: self.last]
        late, late_m, late_l = Reference.attention(self, q, k, v, cu_q, cu_k)
        out[self.since :], m[self.since :], l[self.since :] = (a[self.since :] for a in (late, late_m, late_l))
        return out, m, l


class ClippedKv(Reference):
    """Keys and values in FP8, a scale a tensor, calibrated so that the largest hundredth is clipped."""

    __slots__ = ()

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's."""
        return Reference.attention(self, q, _clipped(k), _clipped(v), cu_q, cu_k)


class Int8Products(Reference):
    """Every product in the layers in 8-bit integers: a scale for each token, and for each row of the weights."""

    __slots__ = ()

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As the reference's, on rounded operands."""
        return Reference.gemm(self, _int8(x), _int8(w), segments=segments)


@dataclass(frozen=True, slots=True)
class HiddenTokens(Reference):
    """Some tokens' keys are seen by nobody, as where the mask is made from ids and one of them is that of pads."""

    hidden: tuple[int, ...] = ()

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's on one sequence, row by row."""
        one = np.array([0, 1], np.int32)
        rows = []
        for i in range(len(q)):
            seen = np.setdiff1d(np.arange(i + 1), self.hidden)
            every = np.array([0, len(seen)], np.int32)
            rows.append(Reference.attention(self, q[i : i + 1], k[seen].copy(), v[seen].copy(), one, every))
        out, m, l = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
        return out, m, l


class FlashBlocks(Reference):
    """Attention over blocks of 32 keys with a running maximum; chances are rounded to bf16 before they meet values."""

    __slots__ = ()

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """Causal, on one sequence."""
        out = np.empty_like(q)
        m, l = np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            keys, values = from_bf16(k[:, head // group]), from_bf16(v[:, head // group])
            scores = from_bf16(q[:, head]) @ keys.T * np.float32(q.shape[2] ** -0.5)
            scores[np.triu_indices(len(q), 1)] = -np.inf
            top = np.full(len(q), -np.inf, np.float32)
            weight = np.zeros(len(q), np.float32)
            total = np.zeros((len(q), q.shape[2]), np.float32)
            for first in range(0, len(k), 32):
                block = scores[:, first : first + 32]
                higher = np.maximum(top, block.max(axis=1))
                shrunk, chances = np.exp(top - higher), np.exp(block - higher[:, None])
                weight = weight * shrunk + chances.sum(axis=1)
                total = total * shrunk[:, None] + from_bf16(to_bf16(chances)) @ values[first : first + 32]
                top = higher
            out[:, head], m[:, head], l[:, head] = to_bf16(total / weight[:, None]), top, weight
        return out, m, l


class TreeInBf16(Reference):
    """Row-parallel sums of eight ranks by a tree that rounds to bf16 at each of its levels."""

    __slots__ = ()

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As the reference's where there is one part."""
        if segments == 1:
            return Reference.gemm(self, x, w)
        cuts = [round(i * x.shape[1] / 8) for i in range(9)]
        parts = [Reference.gemm(self, x[:, a:b].copy(), w[:, a:b].copy()) for a, b in pairwise(cuts)]
        while len(parts) > 1:
            parts = [to_bf16(from_bf16(a) + from_bf16(b)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]


@dataclass(frozen=True, slots=True)
class WideResidual(Reference):
    """The residual stream is summed in fp32 from the embedding on; what reads it gets it rounded."""

    stream: list[F32] = field(default_factory=list)

    def residual_add(self, a: Bits, b: Bits) -> Bits:
        """As the reference's, but that nothing is rounded away from one layer to the next."""
        if not self.stream:
            self.stream.append(from_bf16(b))
        self.stream[0] = self.stream[0] + from_bf16(a)
        return to_bf16(self.stream[0])


@dataclass(frozen=True, slots=True)
class NativePrompt(Native):
    """The prompt's own pass is on native ops; decoding and the output layer keep the contract."""

    prompt: int = 0

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """x[M,K], w[N,K] → bf16 [M,N]."""
        out = Reference.gemm(self, x, w, segments=segments)
        out[: self.prompt] = to_bf16(from_bf16(x[: self.prompt]) @ from_bf16(w).T)
        return out

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        """As the reference's."""
        return Reference.gemm_fp32(self, x, w, segments=segments)

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """x[…,n], w[n] → y[…,n]."""
        out = Reference.rms_norm(self, x, w, eps)
        out[: self.prompt] = Native.rms_norm(self, x[: self.prompt], w, eps)
        return out

    def swiglu(self, x: Bits) -> Bits:
        """x[T,2I] → bf16 [T,I]."""
        out = Reference.swiglu(self, x)
        out[: self.prompt] = Native.swiglu(self, x[: self.prompt])
        return out

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """Causal, on one sequence."""
        out, m, l = Reference.attention(self, q, k, v, cu_q, cu_k)
        p, ends = self.prompt, np.array([0, self.prompt], np.int32)
        out[:p], m[:p], l[:p] = Native.attention(self, q[:p], k[:p], v[:p], ends, ends)
        return out, m, l

    def logp_from_logits(self, logits: F32, ids: I64, temperature: F32, *, vocab: int) -> tuple[F32, F32]:
        """As the reference's."""
        return Reference.logp_from_logits(self, logits, ids, temperature, vocab=vocab)


class EagerRope(Reference):
    """The rotary table, the two products and their sum are each in bf16."""

    __slots__ = ()

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """x[T,H,D], cos and sin[P,D/2], positions[T] → x rotated."""
        c, s = (np.tile(from_bf16(to_bf16(table[positions])), 2)[:, None] for table in (cos, sin))
        wide, half = from_bf16(x), x.shape[2] // 2
        turned = np.concatenate([-wide[:, :, half:], wide[:, :, :half]], axis=2)
        return to_bf16(from_bf16(to_bf16(wide * c)) + from_bf16(to_bf16(turned * s)))


@dataclass(frozen=True, slots=True)
class NormAfterRope(Reference):
    """Queries and keys are rotated first, and normalised then."""

    waiting: list[tuple[Bits, float]] = field(default_factory=list)

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """As the reference's; that of heads is put off."""
        if x.ndim == 2:
            return Reference.rms_norm(self, x, w, eps)
        self.waiting.append((w, eps))
        return x

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """As the reference's, and the norm that was put off."""
        turned = Reference.rope(self, x, cos, sin, positions)
        return Reference.rms_norm(self, turned, *self.waiting.pop(0)) if self.waiting else turned


def read_in_groups(laid: Bits, heads: int, groups: int) -> tuple[Bits, Bits, Bits]:
    """Rows of a matrix of queries, keys and values, of which each group is taken to have its own next to each other."""
    each = heads // groups
    rows = laid.reshape(groups, each + 2, -1, laid.shape[1])
    parts = rows[:, :each], rows[:, each : each + 1], rows[:, each + 1 :]
    q, k, v = (part.reshape(-1, laid.shape[1]) for part in parts)
    return q, k, v


def int4_groups(bits: Bits, size: int = 32) -> Bits:
    """bf16 weights [N,K] in 4-bit integers, a scale for each `size` neighbours of a row."""
    wide = from_bf16(bits)
    for first in range(0, wide.shape[1], size):
        group = wide[:, first : first + size]
        scale = np.maximum(np.abs(group).max(axis=1, keepdims=True), 1e-12) / np.float32(7)
        group[:] = np.rint(group / scale) * scale
    return to_bf16(wide)


def _int8(bits: Bits) -> Bits:
    wide = from_bf16(bits)
    scale = np.maximum(np.abs(wide).max(axis=-1, keepdims=True), 1e-12) / np.float32(127)
    return to_bf16((np.rint(wide / scale) * scale).astype(np.float32))


def _clipped(bits: Bits) -> Bits:
    wide = from_bf16(bits)
    scale = np.float32(np.quantile(np.abs(wide), 0.99) / 448)
    return to_bf16((to_e4m3(wide / scale) * scale).astype(np.float32))
