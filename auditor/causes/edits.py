"""The reference with an op changed: in which layers, at which of its places in a layer, from which token on.

A change is a function that gets the unchanged reference and the op's arguments. `places` are what it can be confined
to.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np

from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference

Change = Callable[..., Any]
Place = tuple[int, int]  # layer, and which of the op's calls in that layer

_CALLS: Final = {"gemm": 7, "rms_norm": 2, "rope": 2, "attention": 1, "swiglu": 1, "residual_add": 2}
# The products of a layer, in the order in which a decoder calls them.
Q, K, V, O, GATE, UP, DOWN = range(7)


@dataclass(frozen=True, slots=True)
class Edit:
    """One op changed. places: None is everywhere. first: token from which on its result is the changed one."""

    op: str
    change: Change
    places: frozenset[Place] | None = None
    first: int = 0

    def at(self, *places: Place) -> "Edit":
        """The same change in these places only."""
        return replace(self, places=frozenset(places))


@dataclass(frozen=True, slots=True)
class Edited(Reference):
    """The reference of a decoder of `layers` layers, on one sequence at a time, under some edits."""

    edits: tuple[Edit, ...] = ()
    layers: int = 1
    qk_norm: bool = False
    _calls: Counter[str] = field(default_factory=Counter)

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As the reference's, unless edited."""
        result: Bits = self._run("gemm", x, w, segments=segments)
        return result

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """As the reference's, unless edited."""
        result: Bits = self._run("rms_norm", x, w, eps)
        return result

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """As the reference's, unless edited."""
        result: Bits = self._run("rope", x, cos, sin, positions)
        return result

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, unless edited."""
        result: tuple[Bits, F32, F32] = self._run("attention", q, k, v, cu_q, cu_k)
        return result

    def swiglu(self, x: Bits) -> Bits:
        """As the reference's, unless edited."""
        result: Bits = self._run("swiglu", x)
        return result

    def residual_add(self, a: Bits, b: Bits) -> Bits:
        """As the reference's, unless edited."""
        result: Bits = self._run("residual_add", a, b)
        return result

    def _run(self, op: str, *args: Any, **more: Any) -> Any:
        place = _place(op, self._calls[op], self.layers, self.qk_norm)
        self._calls[op] += 1
        plain = plain_reference(self)
        for edit in self.edits:
            if edit.op != op or (edit.places is not None and place not in edit.places):
                continue
            if edit.first == 0:
                return edit.change(plain, *args, **more)
            return _from(edit.first, getattr(plain, op)(*args, **more), edit.change(plain, *args, **more))
        return getattr(plain, op)(*args, **more)


def edited(decoder: Decoder, *edits: Edit) -> Decoder:
    """The decoder under some edits; of two for one op and place, the first."""
    config, settings = decoder.config, settings_of(decoder.reference)
    return replace(decoder, reference=Edited(**settings, edits=edits, layers=config.layers, qk_norm=config.qk_norm))


def places(decoder: Decoder, op: str) -> tuple[Place, ...]:
    """All places of an op in a decoder; the norm at the end stands behind the last layer."""
    config = decoder.config
    count = _per_layer(op, config.qk_norm)
    return tuple(
        _place(op, at, config.layers, config.qk_norm) for at in range(count * config.layers + (op == "rms_norm"))
    )


def settings_of(reference: Reference) -> dict[str, Any]:
    """The parameters of a reference, for another kind of it."""
    return {f.name: getattr(reference, f.name) for f in fields(Reference)}


def plain_reference(reference: Reference) -> Reference:
    """The reference without whatever a subclass changes."""
    return Reference(**settings_of(reference))


def _per_layer(op: str, qk_norm: bool) -> int:
    return _CALLS[op] + 2 * (op == "rms_norm" and qk_norm)


def _place(op: str, at: int, layers: int, qk_norm: bool) -> Place:
    """Where the `at`-th call stands; a decoder that runs once more starts over."""
    count = _per_layer(op, qk_norm)
    at %= count * layers + (op == "rms_norm")
    return at // count, at % count


def _from(first: int, before: Any, after: Any) -> Any:
    """Rows of `after` from `first` on, of `before` up to there; of each array where an op gives several."""
    if isinstance(before, tuple):
        return tuple(_from(first, a, b) for a, b in zip(before, after, strict=True))
    return np.concatenate([before[:first], after[first:]])
