"""Several decoders of one set of weights, run as one: what none of them changes is computed for all tokens at once.

On a model of real size most of what a few tokens cost is to read the weights, whatever is asked of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from auditor.causes.edits import Edited, plain_reference, settings_of
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference


@dataclass(frozen=True, slots=True)
class Together(Reference):
    """The references of several decoders, each on a sequence of its own. ends: where those lie, [members + 1]."""

    members: tuple[Reference, ...] = ()
    ends: tuple[int, ...] = (0,)

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As each member's."""
        result: Bits = self._each("gemm", (x,), w, segments=segments)
        return result

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """As each member's."""
        result: Bits = self._each("rms_norm", (x,), w, eps)
        return result

    def swiglu(self, x: Bits) -> Bits:
        """As each member's."""
        result: Bits = self._each("swiglu", (x,))
        return result

    def residual_add(self, a: Bits, b: Bits) -> Bits:
        """As each member's."""
        result: Bits = self._each("residual_add", (a, b))
        return result

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """As each member's."""
        if not self._changed("rope"):
            return plain_reference(self).rope(x, cos, sin, positions)
        parts = [m.rope(x[a:b], cos, sin, positions[a:b]) for m, a, b in self._members()]
        return np.concatenate(parts)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As each member's; running maximum and sum are not made."""
        if not self._changed("attention"):
            return plain_reference(self).attention(q, k, v, cu_q, cu_k)
        parts = [
            m.attention(q[a:b].copy(), k[a:b].copy(), v[a:b].copy(), *2 * (np.array([0, b - a], np.int32),))[0]
            for m, a, b in self._members()
        ]
        none = np.zeros(q.shape[:2], np.float32)
        return np.concatenate(parts), none, none

    def _each(self, op: str, arrays: tuple[Bits, ...], *args: Any, **more: Any) -> Any:
        if not self._changed(op):
            return getattr(plain_reference(self), op)(*arrays, *args, **more)
        parts = [
            getattr(member, op)(*(array[a:b].copy() for array in arrays), *args, **more)
            for member, a, b in self._members()
        ]
        return np.concatenate(parts)

    def _changed(self, op: str) -> bool:
        """Whether a member has an edit of it."""
        return any(edit.op == op for member in self.members if isinstance(member, Edited) for edit in member.edits)

    def _members(self) -> list[tuple[Reference, int, int]]:
        return [(member, a, b) for member, (a, b) in zip(self.members, pairwise(self.ends), strict=True)]


def alike(one: Decoder, other: Decoder) -> bool:
    """Whether two decoders differ in nothing but edits, so that they can be run together."""
    return (
        one.weights is other.weights
        and one.rope is other.rope
        and one.contract is other.contract
        and all(type(decoder.reference) in (Edited, Reference) for decoder in (one, other))
        and settings_of(one.reference) == settings_of(other.reference)
    )


def hidden_of_each(decoders: Sequence[Decoder], tokens: I64) -> list[Bits]:
    """What each of some decoders that are alike makes of the tokens, bf16 [T,E]."""
    first, count = decoders[0], len(decoders)
    if count == 1:
        return [first.hidden([tokens])]
    ends = tuple(range(0, (count + 1) * len(tokens), len(tokens)))
    members = tuple(decoder.reference for decoder in decoders)
    joined = replace(first, reference=Together(**settings_of(first.reference), members=members, ends=ends))
    return np.split(joined.hidden([tokens] * count), count)
