"""A softmax of which some steps are held in 16 bits: logits, heated ones, exponentials, sums, parts of sums.

A kernel rounds where it writes, and no two write alike. So every set of steps is tried on a few rows; a few rows tell.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import F32, I64, Oracle
from auditor.causes.search import Candidate, nearest
from auditor.compare import Logprobs
from rl_kernel.reference.ops import narrow, widen

Rounding = Callable[[F32], F32]
Rows = I64 | slice
OfRows = Callable[[Rows], Logprobs]

_STEPS: Final = ("logits", "heated logits", "logits less the largest", "exponentials", "their sum", "its logarithm")
_ROWS: Final = 6
_WORK: Final = 1 << 17  # logits of the rows on which every set is tried
_LARGEST: Final = 1.0  # a difference
_SMALLEST: Final = 1e-5
_LEFT: Final = 0.1  # of the difference, by sums in another order
_TILE: Final = 64
_RANKS: Final = (2, 3, 4, 8)


def rounded_steps(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Which steps of the softmax, or parts of its sum, are rounded, where the differences are small."""
    size = np.abs(evidence.delta[evidence.differs])
    if size.max() > _LARGEST or np.median(size) < _SMALLEST:
        return
    if best := nearest(evidence, oracle, _fit(evidence, oracle)):
        yield best


def _fit(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    window, vocab = oracle.window, oracle.decoder.config.vocab
    found, truth = (values[window].astype(np.float64) for values in (evidence.found, evidence.truth))
    wrong = np.flatnonzero(evidence.differs[window] & np.isfinite(found))
    if not wrong.size:
        return
    few = wrong[np.linspace(0, len(wrong) - 1, max(2, min(_ROWS, _WORK // vocab))).astype(np.int64)]
    before = np.abs(truth[few] - found[few]).mean()
    for name, values in _variants(oracle):
        oracle.check_budget()
        if np.abs(values(few) - found[few]).mean() < _LEFT * before:
            yield "bf16_head", name, values(slice(None))


def _variants(oracle: Oracle) -> Iterator[tuple[str, OfRows]]:
    formats: tuple[tuple[str, Rounding], ...] = (("bf16", _to_bf16), ("fp16", _to_fp16))
    for name, rounded in formats:
        yield f"log-probabilities in {name}", partial(_result, oracle, rounded=rounded)
        for steps in product((False, True), repeat=len(_STEPS)):
            said = ", ".join(step for step, here in zip(_STEPS, steps, strict=True) if here)
            for drawn in (True, False) if any(steps[:3]) else (True,):
                how = "" if drawn else ", the drawn token's own in fp32"
                if said:
                    values = partial(_in_steps, oracle, rounded=rounded, steps=steps, drawn=drawn)
                    yield f"a softmax with {said} in {name}{how}", values
        for size in _sizes(oracle.decoder.config.vocab):
            values = partial(_in_parts, oracle, rounded=rounded, size=size)
            yield f"a log-sum-exp of parts of {size} tokens, each in {name}", values


def _sizes(vocab: int) -> list[int]:
    tiles = [_TILE << shift for shift in range(12) if _TILE << shift < vocab]
    return list(dict.fromkeys([*(-(-vocab // ranks) for ranks in _RANKS), *tiles]))


def _in_steps(oracle: Oracle, rows: Rows, rounded: Rounding, steps: tuple[bool, ...], drawn: bool) -> Logprobs:
    def held(step: int, x: F32) -> F32:
        return rounded(x) if steps[step] else x

    targets, vocab = oracle.targets[rows], oracle.decoder.config.vocab
    exact = (oracle.own_logits[rows, :vocab] / np.float32(oracle.temperature)).astype(np.float32)
    z = held(0, oracle.own_logits[rows, :vocab])
    z = held(1, (z / np.float32(oracle.temperature)).astype(np.float32))
    top, every = z.max(axis=1, keepdims=True), np.arange(len(z))
    z = held(2, z - top)
    total = held(4, held(3, np.exp(z)).sum(axis=1, dtype=np.float32))
    chosen = z[every, targets] if drawn else (exact - top)[every, targets]
    values: Logprobs = chosen - held(5, np.log(total))
    return values


def _result(oracle: Oracle, rows: Rows, rounded: Rounding) -> Logprobs:
    return rounded(oracle.from_logits(oracle.own_logits[rows], targets=oracle.targets[rows]))


def _in_parts(oracle: Oracle, rows: Rows, rounded: Rounding, size: int) -> Logprobs:
    targets, vocab = oracle.targets[rows], oracle.decoder.config.vocab
    z = (oracle.own_logits[rows, :vocab] / np.float32(oracle.temperature)).astype(np.float32)
    parts = np.stack([rounded(_lse(z[:, first : first + size])) for first in range(0, vocab, size)], axis=1)
    values: Logprobs = z[np.arange(len(z)), targets] - _lse(parts)
    return values


def _lse(z: F32) -> F32:
    top = z.max(axis=1)
    total: F32 = top + np.log(np.exp(z - top[:, None]).sum(axis=1, dtype=np.float32))
    return total


def _to_bf16(x: F32) -> F32:
    return widen(narrow(x))


def _to_fp16(x: F32) -> F32:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)
