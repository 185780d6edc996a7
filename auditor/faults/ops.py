"""Broken ops: the reference with one op that does what a faulty engine does."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from auditor.faults.world import from_bf16, to_bf16
from rl_kernel.reference.ops import F32, I32, Bits, Reference

R = TypeVar("R", bound=Reference)
Kv = tuple[Bits, Bits]


def broken(kind: type[R], reference: Reference, **settings: Any) -> R:
    """`reference` as the broken `kind`."""
    return kind(**{f.name: getattr(reference, f.name) for f in fields(Reference)}, **settings)


@dataclass(frozen=True, slots=True)
class NativeProducts(Reference):
    """Products in the order of the local BLAS, as an engine without a contract computes them."""

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """x[M,K], w[N,K] → bf16 [M,N]."""
        return to_bf16(self.gemm_fp32(x, w))

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        """x[M,K], w[N,K] → fp32 [M,N]."""
        product: F32 = from_bf16(x) @ from_bf16(w).T
        return product


@dataclass(frozen=True, slots=True)
class ThreeParts(Reference):
    """Products whose K is cut in three uneven parts, added left to right."""

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """x[M,K], w[N,K] → bf16 [M,N]."""
        cuts = [0, w.shape[1] // 3, w.shape[1] // 2, w.shape[1]]
        total = np.zeros((x.shape[0], w.shape[0]), np.float32)
        for first, last in pairwise(cuts):
            total += Reference.gemm_fp32(self, x[:, first:last].copy(), w[:, first:last].copy())
        return to_bf16(total)


@dataclass(frozen=True, slots=True)
class KeepKv(Reference):
    """The reference, remembering every layer's keys and values."""

    kept: list[Kv] = field(default_factory=list)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's."""
        self.kept.append((k.copy(), v.copy()))
        return Reference.attention(self, q, k, v, cu_q, cu_k)


@dataclass(frozen=True, slots=True)
class WrongKv(Reference):
    """Keys and values of tokens first..last come from somewhere else, layer by layer."""

    layers: Sequence[Kv] = ()
    first: int = 0
    last: int = 0
    at: list[int] = field(default_factory=lambda: [0])

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        foreign_k, foreign_v = self.layers[self.at[0]]
        self.at[0] += 1
        k, v = k.copy(), v.copy()
        k[self.first : self.last], v[self.first : self.last] = (
            a[self.first : self.last] for a in (foreign_k, foreign_v)
        )
        return Reference.attention(self, q, k, v, cu_q, cu_k)


@dataclass(frozen=True, slots=True)
class HiddenKeys(Reference):
    """At the edges of context-parallel slices a query sees only its own slice, in the last layer."""

    edges: tuple[int, ...] = ()
    layers: int = 1
    at: list[int] = field(default_factory=lambda: [0])

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, but for the edge rows of the last layer, which see themselves alone."""
        out, m, l = Reference.attention(self, q, k, v, cu_q, cu_k)
        self.at[0] += 1
        if self.at[0] == self.layers:
            for row in self.edges:
                one = np.array([0, 1], np.int32)
                alone, _, _ = Reference.attention(self, q[row : row + 1], k[row : row + 1], v[row : row + 1], one, one)
                out[row] = alone[0]
        return out, m, l


@dataclass(frozen=True, slots=True)
class OtherExperts(Reference):
    """In one layer, some tokens' gate and up are swapped, as if another expert had taken them."""

    rows: tuple[int, ...] = ()
    layers: int = 1
    at: list[int] = field(default_factory=lambda: [0])

    def swiglu(self, x: Bits) -> Bits:
        """As the reference's, but for the given rows of the last layer."""
        self.at[0] += 1
        if self.at[0] == self.layers:
            half = x.shape[1] // 2
            x = x.copy()
            for row in self.rows:
                x[row] = np.concatenate([x[row, half:], x[row, :half]])
        return Reference.swiglu(self, x)
