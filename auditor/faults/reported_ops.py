"""Broken ops of the faults that users reported: the reference with one op as the faulty side had it."""

from dataclasses import dataclass

import numpy as np

from auditor.faults.world import from_bf16, to_bf16
from rl_kernel.reference import _reference
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference


@dataclass(frozen=True, slots=True)
class HiddenSpan(Reference):
    """No token from `last` on sees the keys first..last: a loss mask handed in as the attention mask."""

    first: int = 0
    last: int = 0

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence, in two parts."""
        cut = self.last
        before = np.array([0, cut], np.int32)
        parts = [Reference.attention(self, q[:cut].copy(), k[:cut].copy(), v[:cut].copy(), before, before)]
        seen = np.r_[0 : self.first, cut : len(k)]
        ends = np.array([0, len(q) - cut], np.int32), np.array([0, len(seen)], np.int32)
        parts.append(Reference.attention(self, q[cut:].copy(), k[seen].copy(), v[seen].copy(), *ends))
        out, m, l = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return out, m, l


@dataclass(frozen=True, slots=True)
class OtherScale(Reference):
    """Scores are divided by the root of another dimension than the head's own."""

    dim: int = 1

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, with another scale."""
        out = np.empty_like(q)
        m, l = np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
        scale = np.float32(1.4426950408889634 / np.sqrt(np.float64(self.dim)))
        _reference.attention(out, m, l, q, k, v, cu_q, cu_k, scale, self.kv_partial, self.mma, self.exp2_model)
        return out, m, l


class OtherGroups(Reference):
    """Query head h reads key head h % G, where h // (H / G) is right."""

    __slots__ = ()

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, with the heads in another order."""
        heads, groups = q.shape[1], k.shape[1]
        order = np.arange(heads).reshape(heads // groups, groups).T.reshape(-1)
        out, m, l = Reference.attention(self, q[:, order].copy(), k, v, cu_q, cu_k)
        back = np.argsort(order)
        return out[:, back], m[:, back], l[:, back]


class PairedRope(Reference):
    """Neighbouring values are rotated together, where those half a head apart should be."""

    __slots__ = ()

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """As the reference's, on values in another order."""
        order = np.r_[0 : x.shape[2] : 2, 1 : x.shape[2] : 2]
        turned = Reference.rope(self, x[:, :, order].copy(), cos, sin, positions)
        return np.ascontiguousarray(turned[:, :, np.argsort(order)])


class RoundedParts(Reference):
    """The parts of a row-parallel sum are rounded to bf16 before they are added, as by an all-reduce in bf16."""

    __slots__ = ()

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As the reference's where there is one part."""
        if segments == 1:
            return Reference.gemm(self, x, w)
        size = x.shape[1] // segments
        parts = [
            from_bf16(Reference.gemm(self, x[:, i : i + size].copy(), w[:, i : i + size].copy()))
            for i in range(0, x.shape[1], size)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = from_bf16(to_bf16(total + part))
        return to_bf16(total)


@dataclass(frozen=True, slots=True)
class NativeFrom(Reference):
    """Products of tokens from `first` on are those of the local BLAS: another kernel for another chunk."""

    first: int = 0

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As the reference's up to `first`."""
        right = Reference.gemm(self, x[: self.first].copy(), w, segments=segments)
        native = to_bf16(from_bf16(x[self.first :]) @ from_bf16(w).T)
        return np.concatenate([right, native])


@dataclass(frozen=True, slots=True)
class BlockBehind(Reference):
    """One block of the paged cache holds what the block before it holds."""

    first: int = 0
    size: int = 16

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        k, v = k.copy(), v.copy()
        here, before = slice(self.first, self.first + self.size), slice(self.first - self.size, self.first)
        k[here], v[here] = k[before], v[before]
        return Reference.attention(self, q, k, v, cu_q, cu_k)
