"""Broken ops of the faults that an outside judge wrote down: the reference with one op as the faulty side has it."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from auditor.faults.world import from_bf16, to_bf16
from rl_kernel.reference.ops import F32, I32, Bits, Reference

_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Window(Reference):
    """In some layers a query sees the last `size` keys only."""

    size: int = 1
    layers: tuple[int, ...] = ()
    at: list[int] = field(default_factory=lambda: [0])

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's on one sequence, row by row in the windowed layers."""
        layer = self.at[0]
        self.at[0] += 1
        if layer not in self.layers:
            return Reference.attention(self, q, k, v, cu_q, cu_k)
        return seen_from(self, q, k, v, [max(0, i + 1 - self.size) for i in range(len(q))])


@dataclass(frozen=True, slots=True)
class SliceAlone(Reference):
    """Queries first..last see no key before `first`."""

    first: int = 0
    last: int = 0

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's on one sequence."""
        starts = [self.first if self.first <= i < self.last else 0 for i in range(len(q))]
        return seen_from(self, q, k, v, starts)


@dataclass(frozen=True, slots=True)
class Ring(Reference):
    """Row-parallel sums of four ranks by a ring: each quarter of the columns starts at another rank."""

    ranks: int = 4

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As the reference's where there is one part."""
        if segments == 1:
            return Reference.gemm(self, x, w)
        cuts = [round(i * x.shape[1] / self.ranks) for i in range(self.ranks + 1)]
        parts = [
            Reference.gemm_fp32(self, x[:, a:b].copy(), w[:, a:b].copy())
            for a, b in pairwise(cuts)
        ]  # fmt: skip
        total = np.empty_like(parts[0])
        columns = np.array_split(np.arange(total.shape[1]), self.ranks)
        for first, mine in enumerate(columns):
            total[:, mine] = parts[first][:, mine]
            for later in range(1, self.ranks):
                total[:, mine] += parts[(first + later) % self.ranks][:, mine]
        return to_bf16(total)


@dataclass(frozen=True, slots=True)
class SplitKv(Reference):
    """Attention over `splits` parts of the keys, each with its own softmax, merged at the end in fp32."""

    splits: int = 3

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """Causal, on one sequence; in the local BLAS."""
        out = np.empty_like(q)
        m, l = np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            keys, values = from_bf16(k[:, head // group]), from_bf16(v[:, head // group])
            scores = from_bf16(q[:, head]) @ keys.T * np.float32(_LOG2E / np.sqrt(q.shape[2]))
            scores[np.triu_indices(len(q), 1)] = -np.inf
            m[:, head] = scores.max(axis=1)
            total = np.zeros((len(q), q.shape[2]), np.float32)
            weight = np.zeros(len(q), np.float32)
            for part in np.array_split(np.arange(len(k)), self.splits):
                chances = np.exp2(scores[:, part] - m[:, head, None])
                total += chances @ values[part]
                weight += chances.sum(axis=1)
            l[:, head] = weight
            out[:, head] = to_bf16(total / weight[:, None])
        return out, m, l


@dataclass(frozen=True, slots=True)
class OtherExpertsEarly(Reference):
    """In the first layer, some tokens' gate and up are swapped, as if another expert had taken them."""

    rows: tuple[int, ...] = ()
    at: list[int] = field(default_factory=lambda: [0])

    def swiglu(self, x: Bits) -> Bits:
        """As the reference's, but for the given rows of the first layer."""
        self.at[0] += 1
        if self.at[0] == 1:
            half = x.shape[1] // 2
            x = x.copy()
            for row in self.rows:
                x[row] = np.concatenate([x[row, half:], x[row, :half]])
        return Reference.swiglu(self, x)


def seen_from(ref: Reference, q: Bits, k: Bits, v: Bits, starts: list[int]) -> tuple[Bits, F32, F32]:
    """Attention of one sequence in which query i sees the keys starts[i]..i."""
    one = np.array([0, 1], np.int32)
    rows = [
        Reference.attention(
            ref, q[i : i + 1], k[a : i + 1].copy(), v[a : i + 1].copy(), one, np.array([0, i + 1 - a], np.int32)
        )
        for i, a in enumerate(starts)
    ]
    out, m, l = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
    return out, m, l
