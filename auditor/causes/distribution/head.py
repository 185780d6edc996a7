"""Precision of the head: its product, its logits, or the log-probabilities themselves, in 16 bits or in eight."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from auditor.causes.computation.precision import CASTS, FORMATS, OF_ROWS, Coarse, coarse
from auditor.causes.evidence import STRONG, Evidence, Suggestion
from auditor.causes.oracle import F32, F64, Oracle
from auditor.causes.search import Candidate, nearest, promising
from auditor.compare import Logprobs
from rl_kernel.reference.ops import I64, narrow, widen

_LARGEST: Final = 1 << 28  # bytes of an output layer that is rounded

_PARTS: Final = (2, 4, 8, 3)

Rounding = Callable[[F32], F32]
Rows = I64 | slice
OfRows = Callable[[Rows], Logprobs]


def low_precision_values(evidence: Evidence) -> Iterator[Suggestion]:
    """Every value of the side is one that 16 bits can hold, which fp32 values are not by chance."""
    found = evidence.found[evidence.active]
    if found.size < 4 or not np.isfinite(found).all() or not found.any():
        return
    for name, rounded in _ROUNDINGS:
        if (rounded(found) == found).all():
            yield Suggestion("bf16_head", STRONG, f"all {found.size} log-probabilities are {name} values")
            return


def low_precision_head(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The reference with its logits, or what is made of them, in fewer bits."""
    if best := nearest(evidence, oracle, _candidates(evidence, oracle, _of_logits(oracle))):
        yield best


def low_precision_output(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The reference with the product that makes logits in eight bits, or its weights cut. Dear where they are many."""
    if oracle.head_weights.nbytes > _LARGEST or evidence.begins is not None:
        return
    if best := nearest(evidence, oracle, _candidates(evidence, oracle, _of_products(oracle))):
        yield best


def _candidates(evidence: Evidence, oracle: Oracle, made: Iterable[tuple[str, OfRows]]) -> Iterator[Candidate]:
    for name, values in made:
        oracle.check_budget()
        if promising(evidence, oracle, values):
            yield "bf16_head", name, values(slice(None))


def _read(oracle: Oracle, rows: Rows, logits: Callable[[Rows], F32]) -> Logprobs:
    return oracle.from_logits(logits(rows), targets=oracle.targets[rows])


def _of_logits(oracle: Oracle) -> Iterator[tuple[str, OfRows]]:
    """Name, and log-probabilities of some rows: logits rounded as they are, or once more divided by the temperature."""
    heat = np.float32(oracle.temperature)

    def own(rows: Rows, rounded: Rounding) -> F32:
        return rounded(oracle.own_logits[rows])

    for name, rounded in _ROUNDINGS:
        yield f"logits rounded to {name}", partial(_read, oracle, logits=partial(own, rounded=rounded))
        if heat != 1.0:
            heated = partial(_heated, rounded=rounded, heat=heat)
            yield (
                f"logits divided by the temperature in {name}",
                partial(_read, oracle, logits=partial(own, rounded=heated)),
            )
    for name, rounded in _ROUNDINGS:
        for what, made in _SUMS:
            yield f"{what} in {name}", partial(_summed, oracle, made=made, rounded=rounded)
        yield f"a softmax in {name}", partial(_in_steps, oracle, rounded=rounded, of_sum=False)
        yield f"a log-softmax in {name}", partial(_in_steps, oracle, rounded=rounded, of_sum=True)


def _of_products(oracle: Oracle) -> Iterator[tuple[str, OfRows]]:
    for name, change in _in_few_bits():
        for what, of_hidden, of_weights in (
            ("weights", None, change),
            ("input", change, None),
            ("product", change, change),
        ):
            product = partial(_product, oracle, of_hidden=of_hidden, of_weights=of_weights)
            yield f"an output layer with its {what} {name}", partial(_read, oracle, logits=product)
    for parts in _PARTS:
        for name, rounded in _ROUNDINGS[:2]:
            for last in (True, False):
                product = partial(_of_parts, oracle, parts=parts, rounded=rounded, last=last)
                how = f"an output layer summed of {parts} parts in {name}{', and their sum' if last else ''}"
                yield how, partial(_read, oracle, logits=product)


def _in_few_bits() -> Iterator[tuple[str, Coarse]]:
    for name, to, limit in FORMATS[:3]:
        for over, axes in OF_ROWS[:2]:
            yield f"in {name} with a scale {over}", coarse(to, limit, axes)
    yield from CASTS


def _heated(x: F32, rounded: Rounding, heat: np.float32) -> F32:
    return rounded((rounded(x) / heat).astype(np.float32)) * heat


def _product(oracle: Oracle, rows: Rows, of_hidden: Coarse | None, of_weights: Coarse | None) -> F32:
    hidden, weights = oracle.own_hidden[oracle.rows[rows]], oracle.head_weights
    return oracle.decoder.reference.gemm_fp32(
        of_hidden(hidden) if of_hidden else hidden, of_weights(weights) if of_weights else weights
    )


def _of_parts(oracle: Oracle, rows: Rows, parts: int, rounded: Rounding, last: bool) -> F32:
    """The product cut along what it sums over, each part rounded, and what they add up to where `last`."""
    hidden, weights = oracle.own_hidden[oracle.rows[rows]], oracle.head_weights
    cuts = [round(at * weights.shape[1] / parts) for at in range(parts + 1)]
    total = np.zeros((len(hidden), len(weights)), np.float32)
    for a, b in pairwise(cuts):
        part = oracle.decoder.reference.gemm_fp32(hidden[:, a:b].copy(), weights[:, a:b].copy())
        total = rounded(total + rounded(part)) if last else total + rounded(part)
    return total


def _summed(oracle: Oracle, rows: Rows, made: Callable[[F32, F32, Rounding], Logprobs], rounded: Rounding) -> Logprobs:
    """From a row's own logit and the logarithm of the sum over all, fp32 each."""
    z: F64 = oracle.own_logits[rows, : oracle.decoder.config.vocab].astype(np.float64) / oracle.temperature
    chosen = z[np.arange(len(z)), oracle.targets[rows]].astype(np.float32)
    top = z.max(axis=1)
    lse = (top + np.log(np.exp(z - top[:, None]).sum(axis=1))).astype(np.float32)
    with np.errstate(divide="ignore"):
        return made(chosen, lse, rounded)


def _in_steps(oracle: Oracle, rows: Rows, rounded: Rounding, of_sum: bool) -> Logprobs:
    """Every step rounded, the sum in fp32: the logarithm of a probability, or a logit less the logarithm of a sum."""
    targets = oracle.targets[rows]
    z = rounded(oracle.own_logits[rows, : oracle.decoder.config.vocab] / np.float32(oracle.temperature))
    z = rounded(z - z.max(axis=1, keepdims=True))
    e = rounded(np.exp(z))
    total, every = e.sum(axis=1, dtype=np.float32), np.arange(len(z))
    with np.errstate(divide="ignore"):
        values: Logprobs = (
            rounded(z[every, targets] - rounded(np.log(rounded(total))))
            if of_sum
            else np.log(rounded(e[every, targets] / total))
        )
    return values


_SUMS: Final[tuple[tuple[str, Callable[[F32, F32, Rounding], Logprobs]], ...]] = (
    ("the log-sum-exp", lambda chosen, lse, to: chosen - to(lse)),
    ("logit and log-sum-exp", lambda chosen, lse, to: to(chosen) - to(lse)),
    ("the probability", lambda chosen, lse, to: np.log(to(np.exp(chosen - lse)))),
)


def _to_bf16(x: F32) -> F32:
    return widen(narrow(x))


def _to_fp16(x: F32) -> F32:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def _to_tf32(x: F32) -> F32:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded: F32 = ((bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)
    return rounded


_ROUNDINGS: Final[tuple[tuple[str, Rounding], ...]] = (("bf16", _to_bf16), ("fp16", _to_fp16), ("tf32", _to_tf32))
