"""Tokens that have occurred, punished or barred: by which numbers, and over which part of what came before.

Only the tokens of the sample itself are touched, so that a row is the mass of all others and a few numbers. The three
penalties are fitted together: on few tokens one looks like the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence
from auditor.causes.oracle import F32, F64, I64, Oracle
from auditor.causes.search import Candidate, promising
from auditor.compare import Logprobs

_ROWS: Final = 32
_STEPS: Final = 8
_WINDOWS: Final = (16, 20, 24, 32, 40, 48, 50, 64, 100, 128, 256, 512, 1024)
_MOST_WINDOWS: Final = 128  # windows that are all tried
_LEFT: Final = 0.5  # of the difference: what a fit leaves at most
_BEST: Final = 3
_NEAR: Final = 4  # tokens
_NOTHING: Final = 4e-3
_STEP: Final = 1e-4
_GRAMS: Final = (2, 3, 4, 5)
_MOST_BARRED: Final = 8


@dataclass(frozen=True, slots=True)
class _Scope:
    """What is counted at a row: tokens from `first` on, the last `last` of them, up to `before` tokens ago."""

    name: str
    first: int
    end: int
    last: int
    before: int

    def of(self, row: int) -> slice:
        """Tokens that count in the row that computes token row + 1."""
        end = min(row + 1 - self.before, self.end)
        return slice(min(max(self.first, end - self.last), max(end, 0)), max(end, 0))


def penalties(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    """Repetition, presence and frequency penalties in the scopes that fit best, in few digits first."""
    window = oracle.window
    usable = evidence.active[window] & np.isfinite(evidence.found[window]) & np.isfinite(evidence.truth[window])
    wrong = np.flatnonzero(usable & evidence.differs[window])
    if wrong.size < 4:
        return
    rows = wrong[np.linspace(0, len(wrong) - 1, min(_ROWS, len(wrong))).astype(np.int64)]
    seen = _Seen(evidence, oracle, rows)
    scopes = [*_scopes(oracle), *_since(oracle, int(oracle.rows[wrong[0]]))]
    fits = [(*seen.fit(scope), at) for at, scope in enumerate(scopes)]
    for error, values, at in sorted(fits, key=lambda fit: fit[::2])[:_BEST]:
        if error > _LEFT * seen.before:
            return
        for rounded in _rounded(values):
            name = f"{_said(rounded)} on {scopes[at].name}"
            yield "logit_processor", name, oracle.from_logits(_punished(oracle, scopes[at], rounded))


def barred(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    """Tokens that may not come again, alone or behind the same ones as before."""
    for name, gone in _bars(oracle):
        values = partial(_without, oracle, gone)
        if promising(evidence, oracle, values):
            yield "logit_processor", name, values(np.arange(len(oracle.rows)))


def _bars(oracle: Oracle) -> Iterator[tuple[str, Callable[[int], I64]]]:
    """Name, and which tokens a row bars."""
    last = (_Scope(f"the last {n} tokens", 0, 1 << 40, n, 0) for n in range(1, _MOST_BARRED + 1))
    for scope in (*_scopes(oracle, whole=True), *last):
        yield f"a softmax with no token of {scope.name} once more", partial(_of_scope, oracle.tokens, scope)
    for size in _GRAMS:
        for first, name in ((0, "prompt and response"), (oracle.prompt_len, "the response")):
            said = f"a softmax with no {size} tokens of {name} once more"
            yield said, partial(_completing, oracle.tokens, first, size)


def _without(oracle: Oracle, gone: Callable[[int], I64], rows: I64) -> Logprobs:
    """Of some rows; gone: tokens that a row leaves out, but for the drawn one."""
    logits, targets = oracle.own_logits[rows], oracle.targets[rows]
    for at, row in enumerate(oracle.rows[rows]):
        own = logits[at, targets[at]]
        logits[at, gone(int(row))] = -np.inf
        logits[at, targets[at]] = own
    return oracle.from_logits(logits, targets=targets)


def _of_scope(tokens: I64, scope: _Scope, row: int) -> I64:
    return tokens[scope.of(row)]


def _completing(tokens: I64, first: int, size: int, row: int) -> I64:
    """Tokens that stood behind the last size − 1 ones before."""
    tokens = tokens[first : row + 1]
    if len(tokens) < size:
        return tokens[:0]
    runs = np.lib.stride_tricks.sliding_window_view(tokens, size)
    last = tokens[len(tokens) - size + 1 :]
    behind: I64 = runs[(runs[:, :-1] == last).all(axis=1), -1]
    return behind


def _scopes(oracle: Oracle, whole: bool = False) -> Iterator[_Scope]:
    """The common ones first. whole: without windows."""
    prompt, total, ever = oracle.prompt_len, len(oracle.tokens), 1 << 40
    yield _Scope("prompt and response", 0, ever, ever, 0)
    yield _Scope("the response", prompt, ever, ever, 0)
    yield _Scope("the prompt", 0, prompt, ever, 0)
    yield _Scope("prompt and response but the token before", 0, ever, ever, 1)
    yield _Scope("the response but the token before", prompt, ever, ever, 1)
    if whole:
        return
    windows = range(2, total) if total <= _MOST_WINDOWS else [size for size in _WINDOWS if size < total]
    for size in windows:
        yield _Scope(f"the last {size} tokens", 0, ever, size, 0)
        if size < total - prompt:
            yield _Scope(f"the last {size} tokens of the response", prompt, ever, size, 0)


def _since(oracle: Oracle, row: int) -> Iterator[_Scope]:
    """What is counted from some token of the response on, where `row` is the first that has something to count."""
    for first in range(max(oracle.prompt_len + 1, row - _NEAR), row + 1):
        yield _Scope(f"what came from token {first} on", first, 1 << 40, 1 << 40, 0)


class _Seen:
    """Some rows of the window, as the logits of the sample's own tokens and the mass of all others."""

    def __init__(self, evidence: Evidence, oracle: Oracle, rows: I64) -> None:
        self._oracle, self._rows = oracle, rows
        self._tokens, index = np.unique(oracle.tokens, return_inverse=True)
        z: F64 = oracle.own_logits[rows, : oracle.decoder.config.vocab].astype(np.float64)
        self._own = z[:, self._tokens]
        self._index, self._target = index, index[oracle.rows[rows] + 1]
        z[:, self._tokens] = -np.inf
        self._others = z / oracle.temperature
        self._others = self._others.max(axis=1) + np.log(
            np.exp(self._others - self._others.max(axis=1, keepdims=True)).sum(axis=1)
        )
        self._found = evidence.found[oracle.window][rows].astype(np.float64)
        self._right = self._values(self._counts(_Scope("", 0, 0, 0, 0)), np.zeros(3))
        self.before = float(np.abs(self._found - self._right).mean())

    def fit(self, scope: _Scope) -> tuple[float, F64]:
        """What is left of the difference, and the three numbers: ln(repetition), presence, frequency."""
        counts, values = self._counts(scope), np.zeros(3)
        left = self._found - self._values(counts, values)
        for _ in range(_STEPS):
            size = float(np.abs(left).mean())
            slopes = np.stack(
                [(self._values(counts, values + _STEP * unit) - (self._found - left)) / _STEP for unit in np.eye(3)],
                axis=1,
            )
            step = np.clip(np.linalg.lstsq(slopes, left, rcond=1e-8)[0], -1.0, 1.0)
            closer = self._found - self._values(counts, values + step)
            if not np.abs(closer).mean() < size:
                break
            values, left = values + step, closer
            if size > 0.9 * self.before and np.abs(left).mean() > 0.9 * size:
                break
        return float(np.abs(left).mean()), values

    def _counts(self, scope: _Scope) -> F64:
        spans = (scope.of(int(row)) for row in self._oracle.rows[self._rows])
        counted = [np.bincount(self._index[span], minlength=len(self._tokens)) for span in spans]
        return np.stack(counted).astype(np.float64)

    def _values(self, counts: F64, values: F64) -> F64:
        rep, present, frequent = np.exp(values[0]), values[1], values[2]
        z = np.where(self._own > 0, self._own / rep, self._own * rep) - present - frequent * counts
        z = np.where(counts > 0, z, self._own) / self._oracle.temperature
        top = np.maximum(z.max(axis=1), self._others)
        lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1) + np.exp(self._others - top))
        logp: F64 = z[np.arange(len(z)), self._target] - lse
        return logp


def _rounded(values: F64) -> Iterator[tuple[float, float, float]]:
    """Repetition, presence, frequency in two, in three digits behind the point, and as they are."""
    rep = float(np.exp(values[0]))
    said: list[tuple[float, float, float]] = []
    for digits in (2, 3, 12):
        numbers = round(rep, digits), round(float(values[1]), digits), round(float(values[2]), digits)
        if numbers not in said and numbers != (1.0, 0.0, 0.0):
            said.append(numbers)
            yield numbers


def _said(values: tuple[float, float, float]) -> str:
    rep, present, frequent = values
    parts = [f"a repetition penalty of {rep:.4g}"] if abs(rep - 1) > _NOTHING else []
    parts += [f"a presence penalty of {present:.4g}"] if abs(present) > _NOTHING else []
    parts += [f"a frequency penalty of {frequent:.4g}"] if abs(frequent) > _NOTHING else []
    return " and ".join(parts) or "a small penalty"


def repeated(oracle: Oracle, penalty: float) -> F32:
    """The window's logits under a repetition penalty on all that stands in front."""
    return _punished(oracle, next(_scopes(oracle)), (penalty, 0.0, 0.0))


def _punished(oracle: Oracle, scope: _Scope, values: tuple[float, float, float]) -> F32:
    """In the order of the engines: repetition, frequency, presence."""
    rep, present, frequent = (np.float32(value) for value in values)
    logits: F32 = oracle.own_logits.copy()
    for at, row in enumerate(oracle.rows):
        tokens, counts = np.unique(oracle.tokens[scope.of(int(row))], return_counts=True)
        z = logits[at, tokens]
        z = np.where(z > 0, z / rep, z * rep).astype(np.float32)
        logits[at, tokens] = z - frequent * counts.astype(np.float32) - present
    return logits
