"""What changed weights make of log-probabilities, to the first order: for every part of every tensor at once.

In bf16 a small change and the roundings that it moves look alike. So the model is taken without roundings, and what
roundings alone may do is known beside it, as if every one of them fell out anew. Differences are measured in it.

B rows that are asked for, N and K of a matrix [N,K], S other sets of weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from auditor.causes.oracle import F32, F64, I64, Oracle
from auditor.causes.weights.backward import Backward, Signal
from auditor.causes.weights.parts import Part
from rl_kernel.reference.ops import Bits, widen

_DEAREST: Final = 4e10  # floating point operations
_MOST_BYTES: Final = 1 << 28
_LEAST: Final = 16  # rows that tell anything
# Of a value in bf16, relative to it: the root of two roundings' variance, each even over a step of 2^-8 to 2^-7.
ROUNDED: Final = 0.3 * 2.0**-7


@dataclass(frozen=True, slots=True)
class Effect:
    """Of one tensor's change. rows, columns: float64 [B,N+1] and [B,K+1], of all before each; [B,2] if cut nowhere.

    columns: None where nothing is known of them.
    """

    rows: F64
    columns: F64 | None

    @property
    def whole(self) -> F64:
        """Of all of it, [B]."""
        result: F64 = self.rows[:, -1]
        return result

    def parts(self, axis: int) -> F64:
        """Of all rows, or columns, before each one."""
        if not axis:
            return self.rows
        assert self.columns is not None
        return self.columns

    def part(self, axis: int, first: int, last: int) -> F64:
        """Of rows, or columns, first..last; [B]."""
        sums = self.parts(axis)
        difference: F64 = sums[:, min(last, sums.shape[1] - 1)] - sums[:, first]
        return difference


class Effects(dict[str, Effect]):
    """Of each tensor that is not the same."""

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self)}

    @cached_property
    def _whole(self) -> F64:
        return np.stack([effect.whole for effect in self.values()])

    def of_whole(self, names: Sequence[str]) -> F64:
        """What these tensors make together, [B]."""
        result: F64 = self._whole[[self._places[name] for name in names]].sum(axis=0, dtype=np.float64)
        return result


class Response:
    """The model around its own weights, in some rows of the window."""

    def __init__(self, oracle: Oracle, at: I64) -> None:
        """at: rows of the window, [B]."""
        oracle.spend(len(at) / 2)
        self._weights = oracle.decoder.weights
        self.backward = Backward(oracle, at)
        self._slopes: dict[str, F32] = {}
        self._spread = np.zeros((len(at), len(at)))
        # Of what each layer's attention gives, [B,T,H·D], the last layer's first.
        self.of_attention: list[F32] = []
        for signal in self.backward.signals():
            self._take(signal, self.backward)

    @staticmethod
    def affordable(oracle: Oracle, rows: int) -> bool:
        """Whether the model and the sample are small enough to be run back for so many rows."""
        config, count = oracle.decoder.config, len(oracle.tokens)
        size = sum(weight.size for weight in oracle.decoder.weights.values())
        held = max(size, count * config.intermediate, count * count * config.heads)
        return 4.0 * size * count * rows < _DEAREST and 4.0 * held * rows < _MOST_BYTES

    @cached_property
    def spread(self) -> F64:
        """Of what rounding alone may make: how the rows' differences go together, [B,B]."""
        spread = self._spread * ROUNDED**2
        floor = 1e-6 * float(np.trace(spread)) / len(spread)
        regular: F64 = spread + floor * np.eye(len(spread))
        return regular

    @cached_property
    def _root(self) -> F64:
        root: F64 = np.linalg.cholesky(self.spread).astype(np.float64)
        return root

    def in_roundings(self, values: F64) -> F64:
        """Differences [B] or [B,C] as multiples of what rounding may make of them, each row by itself."""
        whitened: F64 = np.linalg.solve(self._root, values).astype(np.float64)
        return whitened

    def effects(self, others: Sequence[Mapping[str, Bits]], parts: bool) -> list[Effects]:
        """Of every tensor that is not the same in another set of weights, for each of those sets; in roundings.

        parts: row by row and column by column, too.
        """
        found = [Effects() for _ in others]
        for name, slope in self._slopes.items():
            own = self._weights[name]
            changed = [at for at, weights in enumerate(others) if not np.array_equal(weights[name], own)]
            if not changed:
                continue
            change = np.stack([widen(others[at][name]) - widen(own) for at in changed], axis=-1)
            for at, effect in zip(changed, self._of_tensor(slope, change, parts), strict=True):
                found[at][name] = effect
        return found

    def _of_tensor(self, slope: F32, change: F32, parts: bool) -> list[Effect]:
        """slope[B,N,K] or [B,N]; change[N,K,S] or [N,S]."""
        if not parts:
            flat = slope.reshape(len(slope), -1) @ change.reshape(-1, change.shape[-1])
            return [Effect(one, one) for one in map(summed, self.in_roundings(flat.astype(np.float64)).T[:, :, None])]
        if slope.ndim == 2:
            each = [(slope * c, (slope * c).sum(axis=1, keepdims=True)) for c in change.T]
        else:
            rows, columns = slope.transpose(1, 0, 2), slope.transpose(2, 0, 1)
            each = [
                (np.matmul(rows, c[:, :, None])[:, :, 0].T, np.matmul(columns, c.T[:, :, None])[:, :, 0].T)
                for c in np.moveaxis(change, -1, 0)
            ]
        return [Effect(*(summed(self.in_roundings(one.astype(np.float64))) for one in both)) for both in each]

    def _take(self, signal: Signal, backward: Backward) -> None:
        """A tensor's slope, and what the rounding of an op's result may do."""
        name, of_output, given = signal.tensor, signal.of_output, signal.given
        if not name:
            assert given is not None
            self._rounded(of_output, given)
            if signal.attention:
                self.of_attention.append(of_output)
            return
        if given is None and "embed" not in name:
            slope = of_output
        elif given is None:
            rows = np.zeros((len(self._weights[name]), len(of_output), of_output.shape[2]), np.float32)
            np.add.at(rows, backward.tokens, of_output.transpose(1, 0, 2))
            slope = rows.transpose(1, 0, 2)
        elif of_output.ndim == 2:
            slope = np.zeros((len(of_output), *self._weights[name].shape), np.float32)
            slope[:, : of_output.shape[1]] = of_output[:, :, None] * given[:, None, :]
        else:
            slope = of_output.transpose(0, 2, 1) @ given
            self._rounded(of_output, given @ backward.weights[name].T)
        self._slopes[name] = self._slopes[name] + slope if name in self._slopes else slope

    def _rounded(self, signal: F32, values: F32) -> None:
        each = signal * values
        if each.ndim == 2:  # a row's own values
            self._spread += np.diag((each * each).sum(axis=1))
        else:
            flat = each.reshape(len(each), -1)
            self._spread += flat @ flat.T


def summed(each: npt.NDArray[Any]) -> Any:
    """[B,N], all before each and all, [B,N+1]."""
    return np.pad(each, ((0, 0), (1, 0))).cumsum(axis=1)


def rows_of(oracle: Oracle, rows: I64) -> I64:
    """The first ones of some rows, as many as the model can be run back for; all where it cannot be for enough."""
    counts = [count for count in (rows.size, rows.size // 2, rows.size // 4) if count >= _LEAST]
    return rows[: next((count for count in counts if Response.affordable(oracle, count)), rows.size)]


def response_of(oracle: Oracle, rows: I64) -> Response | None:
    """Computed once for the same rows; None where they are few or the model is too large."""
    if rows.size < _LEAST or not Response.affordable(oracle, rows.size):
        return None
    key = rows.tobytes()
    if key not in oracle.responses:
        oracle.responses.clear()
        oracle.responses[key] = Response(oracle, rows)
    response = oracle.responses[key]
    assert isinstance(response, Response)
    return response


def total(effects: Mapping[str, Effect], parts: Sequence[Part], rows: int) -> F64:
    """What a change in some parts makes, [rows]; tensors that do not change make nothing."""
    changed = [part for part in parts if part.name in effects]
    cut = [p for p in changed if p.axis or p.first or p.last < effects[p.name].rows.shape[1] - 1]
    whole = [part.name for part in changed if part not in cut] if cut else [part.name for part in changed]
    result = effects.of_whole(whole) if whole and isinstance(effects, Effects) else np.zeros(rows)
    for part in cut if isinstance(effects, Effects) else changed:
        result = result + effects[part.name].part(*part[1:])
    return result
