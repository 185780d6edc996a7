"""Attention that was computed slice by slice of the keys, as in a ring, and put together by wrong weights."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np

from auditor.causes.oracle import F32
from rl_kernel.reference.ops import I32, Bits, Reference, narrow, widen

_PARTS: Final = (2, 4, 8, 3)
Weigh = Callable[[F32, F32], F32]  # maximum and sum [H,T,parts] → weights of the parts


def merged(length: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Of a sequence of that length: what is said of it, and the attention."""
    for parts in _PARTS:
        edges = [round(i * length / parts) for i in range(parts + 1)]
        for how, weigh in _WEIGHTS:
            yield f"what {parts} slices' keys give is put together {how}", _in_slices(edges, weigh)


def _alike(top: F32, total: F32) -> F32:
    return (total > 0).astype(np.float32)


def _below_own(top: F32, total: F32) -> F32:
    return total


def _by_maximum(top: F32, total: F32) -> F32:
    """The sums are forgotten."""
    largest = top.max(axis=2, keepdims=True)
    return np.where(total > 0, np.exp(top - largest), 0).astype(np.float32)


_WEIGHTS: Final[tuple[tuple[str, Weigh], ...]] = (
    ("as if each weighed the same", _alike),
    ("by sums each of which is below its own maximum", _below_own),
    ("by maxima without sums", _by_maximum),
)


def _in_slices(edges: list[int], weigh: Weigh) -> Callable[..., Any]:
    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        """In fp32, not in the contract's order: what it gives is near, not equal."""
        own, count, group = plain.attention(q, k, v, cu_q, cu_k), len(q), q.shape[1] // k.shape[1]
        keys, values = (np.repeat(widen(a), group, axis=1).transpose(1, 0, 2) for a in (k, v))
        scores = widen(q).transpose(1, 0, 2) @ keys.transpose(0, 2, 1) / np.float32(np.sqrt(q.shape[2]))
        scores[:, np.triu(np.ones((count, count), np.bool_), 1)] = -np.inf
        tops, totals, results = [], [], []
        for first, last in pairwise(edges):
            part = scores[:, :, first:last]
            top = part.max(axis=2, initial=-1e30)
            chances = np.exp(part - top[:, :, None])
            totals.append(chances.sum(axis=2))
            results.append(widen(narrow(chances @ values[:, first:last] / np.maximum(totals[-1], 1e-30)[:, :, None])))
            tops.append(top)
        weights = weigh(np.stack(tops, axis=2), np.stack(totals, axis=2))
        weights = weights / weights.sum(axis=2, keepdims=True)
        out = np.einsum("htp,phtd->thd", weights, np.stack(results))
        kept = min(edges[1], count)
        return np.concatenate([own[0][:kept], narrow(out[kept:])]), *own[1:]

    return attention
