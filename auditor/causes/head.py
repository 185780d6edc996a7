"""Precision of the head: logits, or the log-probabilities themselves, rounded to 16 bits."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from auditor.causes.evidence import STRONG, Evidence, Suggestion, bits_hit, explained, worth_saying
from auditor.causes.oracle import F32, Oracle

_FEW = 16  # rows on which a rounding is tried before all are computed


def low_precision_values(evidence: Evidence) -> Iterator[Suggestion]:
    """Every value of the side is one that 16 bits can hold, which fp32 values are not by chance."""
    found = evidence.found[evidence.active]
    if found.size >= 4 and np.isfinite(found).all() and not (found.view(np.uint32) & 0xFFFF).any() and found.any():
        yield Suggestion("bf16_head", STRONG, f"all {found.size} log-probabilities are bf16 values")
    elif found.size >= 4 and np.isfinite(found).all() and (found.astype(np.float16).astype(np.float32) == found).all():
        yield Suggestion("bf16_head", STRONG, f"all {found.size} log-probabilities are fp16 values")


def low_precision_head(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The reference with logits rounded to bf16 or fp16 gives what the side reports."""
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    few = np.flatnonzero(active)[:_FEW]
    for name, rounded in _roundings(oracle):
        trial = oracle.from_logits(rounded(oracle.own_logits[few]), targets=oracle.targets[few])
        if explained(found[few], truth[few], trial, active[few]) == 0.0:
            continue
        predicted = oracle.from_logits(rounded(oracle.own_logits))
        score = explained(found, truth, predicted, active)
        if worth_saying(score):
            hit = bits_hit(found, predicted, active)
            yield Suggestion("bf16_head", score, f"the values are those of logits {name}; {hit}")
            return


def low_precision_sum(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The reference's logits with the logarithm of their sum, or both terms of the difference, kept in 16 bits."""
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    z = oracle.own_logits[:, : oracle.decoder.config.vocab].astype(np.float64) / oracle.temperature
    chosen = z[np.arange(len(z)), oracle.targets].astype(np.float32)
    top = z.max(axis=1)
    lse = (top + np.log(np.exp(z - top[:, None]).sum(axis=1))).astype(np.float32)
    best: Suggestion | None = None
    for name, rounded in (("bf16", _to_bf16), ("fp16", _to_fp16)):
        for what, first in (("the log-sum-exp", chosen), ("logit and log-sum-exp", rounded(chosen))):
            score = explained(found, truth, first - rounded(lse), active)
            if worth_saying(score) and (best is None or score > best.score):
                best = Suggestion("bf16_head", score, f"the values are those of {what} in {name}")
    if best is not None:
        yield best


def _roundings(oracle: Oracle) -> Iterator[tuple[str, Callable[[F32], F32]]]:
    """Logits rounded as they are, and once more after the division by the temperature."""
    heat = np.float32(oracle.temperature)
    for name, rounded in (("bf16", _to_bf16), ("fp16", _to_fp16)):
        yield f"rounded to {name}", rounded
        if heat != 1.0:
            yield f"divided by the temperature in {name}", partial(_heated, rounded=rounded, heat=heat)


def _heated(x: F32, rounded: Callable[[F32], F32], heat: np.float32) -> F32:
    return rounded((rounded(x) / heat).astype(np.float32)) * heat


def _to_bf16(x: F32) -> F32:
    bits = x.view(np.uint32)
    rounded: F32 = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return rounded


def _to_fp16(x: F32) -> F32:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)
