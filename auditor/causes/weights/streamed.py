"""What changed weights make of log-probabilities, of a model that is too large for the slopes of all its tensors.

A slope times a change is the signal that comes back times what the change makes of an output, summed up over tokens. So
changes are added up while the model is run back, and nothing of a tensor's size is kept for a row.

B rows that are asked for, of which b are in a group, T tokens, N and K of a matrix [N,K], P parts of its columns.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final, Generic, TypeVar

import numpy as np

from auditor.causes.oracle import F32, F64, I64, Oracle
from auditor.causes.weights.backward import Backward, Signal
from auditor.causes.weights.parts import by_column, layer_of
from auditor.causes.weights.response import ROUNDED, Effect, Effects, summed
from rl_kernel.reference.ops import Bits, widen

T = TypeVar("T")
Weights = Mapping[str, Bits]

_GROUP: Final = 8  # rows that are run back together: their signals fit into a core's cache
_EACH: Final = 3  # of so many layers, one's roundings are measured
_PARTS: Final = 24  # of a matrix's columns, so that any 2, 3, 4, 6 or 8 ranks' are told apart
_RECENT: Final = 9  # tensors of a layer, which one group of rows after the other asks for
_AT_A_TIME: Final = 4096  # tokens of the vocabulary
_FORWARDS: Final = 0.25  # that a row costs
_ROWS: Final = 20
_LEAST: Final = 12  # rows that tell anything
_DEAREST: Final = 1.2e12  # floating point operations: some ten seconds of a core


class Streamed:
    """The model around its own weights, in some rows of the window; run back once for all that is asked at a time."""

    def __init__(self, oracle: Oracle, at: I64, others: Sequence[Weights]) -> None:
        """at: rows of the window, rising [B]. others: of which effects will be asked, row by row."""
        self._oracle, self.at = oracle, at
        self._squares = np.zeros((len(at), len(at)))
        self._known: list[tuple[Weights, Effects]] = []
        self._run_back(others, parts=True, measure=True)

    @cached_property
    def _inverse(self) -> F64:
        """Of the root of how the rows' differences go together where every rounding falls out anew, [B,B]."""
        spread = self._squares * ROUNDED**2
        floor = 1e-6 * float(np.trace(spread)) / len(spread)
        inverse: F64 = np.linalg.inv(np.linalg.cholesky(spread + floor * np.eye(len(spread)))).astype(np.float64)
        return inverse

    def in_roundings(self, values: F64) -> F64:
        """As a response's; what two groups of rows have in common is left out."""
        whitened: F64 = self._inverse @ values
        return whitened

    def effects(self, others: Sequence[Weights], parts: bool) -> list[Effects]:
        """As a response's."""
        new = [weights for weights in others if self._of(weights) is None]
        if new:
            self._run_back(new, parts, measure=False)
        return [self._of(weights) or Effects() for weights in others]

    def _of(self, weights: Weights) -> Effects | None:
        return next((effects for known, effects in self._known if known is weights), None)

    def _run_back(self, others: Sequence[Weights], parts: bool, measure: bool) -> None:
        self._oracle.spend(_FORWARDS * len(self.at))
        backward = Backward(self._oracle, self.at, _GROUP)
        changes, roundings = _Changes(backward, len(self.at), others, parts), _Roundings(backward, self._squares)
        for signal in backward.signals():
            if measure:
                roundings.take(signal)
            if signal.tensor:
                changes.take(signal)
        self._known += [
            (weights, Effects((name, self._effect(*both)) for name, both in raw.items()))
            for weights, raw in zip(others, changes.found, strict=True)
        ]

    def _effect(self, rows: F32, columns: F32 | None) -> Effect:
        inverse = self._inverse.astype(np.float32)
        return Effect(summed(inverse @ rows), None if columns is None else summed(inverse @ columns))


def streamed(oracle: Oracle, rows: I64, others: Sequence[Weights]) -> Streamed | None:
    """Of the first of some rows, as many as can be paid for; None where that is not enough. Computed once."""
    size = sum(weight.size for weight in oracle.decoder.weights.values())
    most = int(_DEAREST / (4.0 * size * len(oracle.tokens)))
    if (count := min(rows.size, most, _ROWS)) < _LEAST:
        return None
    key = b"streamed" + rows[:count].tobytes()
    if key not in oracle.responses:
        oracle.responses[key] = Streamed(oracle, rows[:count], others)
    found = oracle.responses[key]
    assert isinstance(found, Streamed)
    return found


class _Roundings:
    """What rounding may do: of what products and the ops between them give, in some layers for all of them."""

    def __init__(self, backward: Backward, squares: F64) -> None:
        """squares: [B,B], to which is added."""
        self._weights, self._layer, self._squares = backward.weights, -1, squares
        self._results = _Recent[F32](_RECENT)

    def take(self, signal: Signal) -> None:
        name, given = signal.tensor, signal.given
        self._layer = layer_of(name) if name else self._layer
        if given is None or (self._layer >= 0 and self._layer % _EACH != _EACH // 2):
            return
        if name and signal.of_output.ndim == 2:
            return  # logits are not rounded
        values = given
        if name:
            values = self._results.of(name, lambda: given @ self._weights[name].T)[: len(given)]
        each = signal.of_output * values
        squares = self._squares[signal.rows, signal.rows]
        if each.ndim == 2:  # a row's own values
            squares += np.diag((each * each).sum(axis=1))
        else:
            flat = each.reshape(len(each), -1)
            squares += (1 if self._layer < 0 else _EACH) * (flat @ flat.T)


class _Changes:
    """What each other set of weights makes of each row. found: by tensor, of its rows [B,N] and its columns [B,K]."""

    def __init__(self, backward: Backward, rows: int, others: Sequence[Weights], parts: bool) -> None:
        self._own, self._tokens, self._wide = backward.decoder.weights, backward.tokens, backward.weights
        self._rows, self._others, self._parts = rows, others, parts
        self.found: list[dict[str, tuple[F32, F32 | None]]] = [{} for _ in others]
        self._right = _Recent[F32](_RECENT)
        self._made = _Recent[tuple[F32, F32 | None]](_RECENT * len(others))

    def take(self, signal: Signal) -> None:
        name = signal.tensor
        for at, other in enumerate(self._others):
            if other[name] is not self._own[name]:
                self._add(at, signal, *self._of(signal, other[name], f"{at} {name}"))

    def _of(self, signal: Signal, other: Bits, key: str) -> tuple[F32, F32 | None]:
        """Of a group's rows: of the tensor's rows [b,N] and columns [b,K]; [b,1] where parts are not asked for."""
        name, slope, given = signal.tensor, signal.of_output, signal.given
        if given is None and slope.ndim == 3:
            return self._of_embedding(slope, other, name)
        if given is None:
            each = slope * (widen(other) - self._wide[name])
            return each, each.sum(axis=1, keepdims=True)
        if slope.ndim == 2:
            return _of_head(slope, given, self._own[name], other)
        made, by_part = self._made.of(key, lambda: self._change(name, other, given))
        flat, count = slope.reshape(len(slope), -1), len(given)
        if not self._parts:
            whole = flat @ made[:count].reshape(-1, 1)
            return whole, whole
        rows = np.einsum("btn,tn->bn", slope, made[:count])
        if by_part is None:
            return rows, None
        width = np.diff(_edges(other.shape[1]))
        columns = flat @ by_part[:, :count].reshape(len(width), -1).T
        return rows, np.repeat(columns / width.astype(np.float32), width, axis=1)

    def _change(self, name: str, other: Bits, given: F32) -> tuple[F32, F32 | None]:
        """What a changed matrix adds to its output [T,N]; by parts of its columns, if ranks hold those [P,T,N]."""
        wide, own = widen(other), self._wide[name]
        if not (self._parts and by_column(name)):
            return given @ wide.T - self._right.of(name, lambda: given @ own.T), None
        change, edges = wide - own, _edges(wide.shape[1])
        each = np.stack([given[:, a:b] @ change[:, a:b].T for a, b in pairwise(edges)])
        return each.sum(axis=0), each

    def _of_embedding(self, slope: F32, other: Bits, name: str) -> tuple[F32, F32]:
        tokens = self._tokens[: slope.shape[1]]
        change = widen(other[tokens]) - widen(self._own[name][tokens])
        each = np.zeros((len(other), len(slope)), np.float32)
        np.add.at(each, tokens, np.einsum("bte,te->tb", slope, change))
        return each.T, np.einsum("bte,te->be", slope, change)

    def _add(self, at: int, signal: Signal, rows: F32, columns: F32 | None) -> None:
        found, name = self.found[at], signal.tensor
        if name not in found:
            nothing = np.zeros((self._rows, rows.shape[1]), np.float32)
            found[name] = nothing, None if columns is None else np.zeros((self._rows, columns.shape[1]), np.float32)
        for whole, part in zip(found[name], (rows, columns), strict=True):
            if whole is not None and part is not None:
                whole[signal.rows] += part


def _of_head(slope: F32, hidden: F32, own: Bits, other: Bits) -> tuple[F32, F32]:
    """Of an output layer, a part of the vocabulary at a time; rows that are padding make nothing."""
    rows, columns = np.zeros((len(slope), len(own)), np.float32), np.zeros_like(hidden)
    for first in range(0, slope.shape[1], _AT_A_TIME):
        part = slice(first, min(first + _AT_A_TIME, slope.shape[1]))
        change = widen(other[part]) - widen(own[part])
        rows[:, part] = slope[:, part] * (hidden @ change.T)
        columns += (slope[:, part] @ change) * hidden
    return rows, columns


def _edges(width: int) -> I64:
    return np.unique(np.linspace(0, width, min(_PARTS, width) + 1).round().astype(np.int64))


class _Recent(dict[str, T], Generic[T]):
    """What was made for the last few names."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def of(self, name: str, make: Callable[[], T]) -> T:
        """Made once, as long as it is kept."""
        if name not in self:
            while len(self) >= self._most:
                del self[next(iter(self))]
            self[name] = make()
        return self[name]
