"""Broken ops of the sixth blind list."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from auditor.faults.ops import Kv
from auditor.faults.world import from_bf16, to_bf16
from rl_kernel.reference import _reference
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference, attention_scale


def _counter() -> list[int]:
    return [0]


def fp8(x: F32, mantissa: int, least: int, largest: float) -> F32:
    """Round x to an 8-bit float: bits of mantissa, smallest exponent, largest number."""
    held = np.clip(x, -largest, largest)
    exponent = np.frexp(np.abs(held))[1] - 1
    step = np.exp2(np.maximum(exponent, least) - mantissa).astype(np.float32)
    rounded: F32 = (np.rint(held / step) * step).astype(np.float32)
    return rounded


def e4m3(x: F32) -> F32:
    """Round x to FP8 E4M3."""
    return fp8(x, 3, -6, 448.0)


def e5m2(x: F32) -> F32:
    """Round x to FP8 E5M2."""
    return fp8(x, 2, -14, 57344.0)


@dataclass(frozen=True, slots=True)
class SeenKeys(Reference):
    """Each row sees only the keys that `seen` says of a layer and a row, the last of which is its own."""

    seen: Callable[[int, int], I64] = lambda layer, row: np.arange(row + 1)
    at: list[int] = field(default_factory=_counter)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        out, m, l = Reference.attention(self, q, k, v, cu_q, cu_k)
        for row in range(len(q)):
            keys = self.seen(self.at[0], row)
            if len(keys) <= row:
                out[row] = one_row(self, q, k[keys], v[keys], row)[0]
        self.at[0] += 1
        return out, m, l


def one_row(reference: Reference, q: Bits, k: Bits, v: Bits, row: int) -> tuple[Bits, F32, F32]:
    """One row of q over all of k and v: out[H,D], m[H], l[H]."""
    ends = np.array([0, 1], np.int32), np.array([0, len(k)], np.int32)
    out, m, l = Reference.attention(reference, q[row : row + 1].copy(), k.copy(), v.copy(), *ends)
    return out[0], m[0], l[0]


@dataclass(frozen=True, slots=True)
class LaterKv(Reference):
    """Rows from `first` on read keys and values as `change` leaves them; the rows before read right ones."""

    first: int = 0
    change: Callable[[Bits], Bits] = lambda kept: kept

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        right = Reference.attention(self, q, k, v, cu_q, cu_k)
        wrong = Reference.attention(self, q, self.change(k.copy()), self.change(v.copy()), cu_q, cu_k)
        first = self.first
        right[0][first:], right[1][first:], right[2][first:] = (part[first:] for part in wrong)
        return right


@dataclass(frozen=True, slots=True)
class CachedKv(Reference):
    """Tokens before `until` are not computed anew: their keys and values are in `cache`. kept: what is there after."""

    cache: Sequence[Kv] = ()
    until: int = 0
    kept: list[Kv] = field(default_factory=list)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        k, v = k.copy(), v.copy()
        if self.until:
            old_k, old_v = self.cache[len(self.kept)]
            k[: self.until], v[: self.until] = old_k[: self.until], old_v[: self.until]
        self.kept.append((k, v))
        return Reference.attention(self, q, k, v, cu_q, cu_k)


@dataclass(frozen=True, slots=True)
class SplitKv(Reference):
    """Attention in parts of `part` keys, each rounded to bf16 and merged afterwards by its mass."""

    part: int = 32

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        out, m, l = Reference.attention(self, q, k, v, cu_q, cu_k)
        for row in range(self.part, len(q)):
            starts = range(0, row + 1, self.part)
            parts = [
                one_row(self, q, k[a : min(a + self.part, row + 1)], v[a : min(a + self.part, row + 1)], row)
                for a in starts
            ]
            top = np.max([p[1] for p in parts], axis=0)
            total, mass = np.zeros(out[row].shape, np.float32), np.zeros((q.shape[1], 1), np.float32)
            for values, largest, amount in parts:
                share = (amount * np.exp2(largest - top))[:, None]
                total += from_bf16(values) * share
                mass += share
            out[row] = to_bf16((total / mass).astype(np.float32))
        return out, m, l


@dataclass(frozen=True, slots=True)
class RoundedAllReduce(Reference):
    """Row-parallel products: each rank's part is rounded to bf16, and so is the sum after each hop of the ring."""

    ranks: int = 4

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """x[M,K], w[N,K] → bf16 [M,N]."""
        if segments == 1:
            return Reference.gemm(self, x, w)
        cuts = np.linspace(0, w.shape[1], self.ranks + 1).astype(int)
        total = None
        for first, last in pairwise(cuts):
            part = Reference.gemm(self, x[:, first:last].copy(), w[:, first:last].copy())
            total = part if total is None else to_bf16(from_bf16(total) + from_bf16(part))
        assert total is not None
        return total


@dataclass(frozen=True, slots=True)
class Fp8Products(Reference):
    """Products of E4M3 inputs and E4M3 weights, one scale a tensor, as an FP8 recipe of the trainer has them."""

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """x[M,K], w[N,K] → bf16 [M,N]."""
        parts = []
        scale = np.float32(1)
        for tensor in (from_bf16(x), from_bf16(w)):
            unit = np.abs(tensor).max() / np.float32(448.0)
            parts.append(to_bf16(e4m3(tensor / unit)))
            scale = scale * unit
        return to_bf16(Reference.gemm_fp32(self, parts[0], parts[1], segments=segments) * scale)


@dataclass(frozen=True, slots=True)
class LayerRope(Reference):
    """One layer is rotated by a table of its own."""

    layer: int = 0
    table: tuple[F32, ...] = ()
    at: list[int] = field(default_factory=_counter)

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """As the reference's, called for queries and for keys of each layer."""
        if self.at[0] // 2 == self.layer:
            cos, sin = self.table
        self.at[0] += 1
        return Reference.rope(self, x, cos, sin, positions, inverse=inverse)


@dataclass(frozen=True, slots=True)
class NormAfterRope(Reference):
    """Queries and keys are rotated first and normalised afterwards."""

    waiting: list[tuple[Bits, float]] = field(default_factory=list)

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """As the reference's, but put off for heads."""
        if x.ndim == 3:
            self.waiting.append((w, eps))
            return x
        return Reference.rms_norm(self, x, w, eps)

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """As the reference's, then the norm that was put off."""
        turned = Reference.rope(self, x, cos, sin, positions, inverse=inverse)
        return Reference.rms_norm(self, turned, *self.waiting.pop(0)) if self.waiting else turned


@dataclass(frozen=True, slots=True)
class OtherScale(Reference):
    """Scores are divided by the root of `times` head dimensions."""

    times: float = 1.0

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, with another scale."""
        out = np.empty_like(q)
        m, l = np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
        scale = np.float32(attention_scale(q.shape[2]) / np.sqrt(self.times))
        _reference.attention(out, m, l, q, k, v, cu_q, cu_k, scale, self.kv_partial, self.mma, self.exp2_model)
        return out, m, l


def kept_by_mass(logits: np.ndarray, mass: float) -> np.ndarray:
    """The likeliest tokens of each row, up to the one that reaches `mass`, bool [R,V]."""
    p = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    order = np.argsort(-p, axis=1)
    ordered = np.take_along_axis(p, order, axis=1)
    kept = np.zeros(p.shape, np.bool_)
    np.put_along_axis(kept, order, np.cumsum(ordered, axis=1) - ordered < mass, axis=1)
    return kept
