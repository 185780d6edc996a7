"""Another order of summation: split-K, a batch-dependent kernel, another tree. Small, flat, everywhere."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.causes.search import Model, nearest_model
from rl_kernel.reference.ops import F32, Bits, Reference, narrow, widen

_PARTS: Final = (2, 4, 8, 16)
_ODD_PARTS: Final = (3, 6, 5, 32)
_LARGEST: Final = 1.0


def split_sums(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Row-parallel sums in another number of parts, products cut along K, parts or results rounded on the way."""
    if np.abs(evidence.delta).max() > _LARGEST:
        return
    if best := nearest_model(evidence, oracle, _models(oracle)):
        yield best


def rounding_noise(oracle: Oracle) -> float:
    """Median difference that roundings to bf16 on the way make: about as much as any order of sums and steps does.

    Of all rows: the further a text goes on, the surer a model is of it, and the less roundings move.
    """
    steps = Edit("gemm", _rounded(2)), Edit("rms_norm", _norm_in_steps), Edit("swiglu", _swiglu_in_steps)
    noisy = oracle.logprobs(edited(oracle.decoder, *steps))
    own = oracle.from_logits(oracle.own_logits)
    return float(np.median(np.abs(noisy.astype(np.float64) - own)))


def _models(oracle: Oracle) -> Iterator[Model]:
    decoder, own = oracle.decoder, oracle.decoder.contract.segments
    for parts in (1, *_PARTS):
        if parts != own:
            name = f"o_proj and down_proj summed in {parts} parts, not the contract's {own}"
            yield Model("reduction_order", name, oracle.with_segments(parts))
    for parts in (*_PARTS, *_ODD_PARTS):
        name, edit = f"every product summed in {parts} parts", Edit("gemm", _split(parts))
        yield Model.of(decoder, "reduction_order", name, edit)
    for parts in dict.fromkeys((own, 2, 4, 8)):
        name, edit = (
            f"{parts} parts of o_proj and down_proj rounded before they are added",
            Edit("gemm", _rounded(parts)),
        )
        yield Model.of(decoder, "reduction_order", name, edit)
    yield Model.of(decoder, "reduction_order", "norms rounded before their weights", Edit("rms_norm", _norm_in_steps))
    yield Model.of(decoder, "reduction_order", "SiLU rounded before the product", Edit("swiglu", _swiglu_in_steps))


def _split(parts: int) -> Callable[..., Any]:
    """Cut along K where it divides, as GPU libraries do it for few rows."""

    def gemm(plain: Reference, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        return plain.gemm(x, w, segments=parts if w.shape[1] % parts == 0 else segments)

    return gemm


def _rounded(parts: int) -> Callable[..., Any]:
    """As by an all-reduce in bf16, one rank after the other."""

    def gemm(plain: Reference, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        if segments == 1 or x.shape[1] % parts:
            return plain.gemm(x, w, segments=segments)
        size = x.shape[1] // parts
        cuts = range(0, x.shape[1], size)
        total, *rest = (widen(plain.gemm(x[:, i : i + size].copy(), w[:, i : i + size].copy())) for i in cuts)
        for part in rest:
            total = widen(narrow(total + part))
        return narrow(total)

    return gemm


def _norm_in_steps(plain: Reference, x: Bits, w: Bits, eps: float) -> Bits:
    one = np.full_like(w, narrow(np.ones(1, np.float32))[0])
    return narrow(widen(plain.rms_norm(x, one, eps)) * widen(w))


def _swiglu_in_steps(plain: Reference, x: Bits) -> Bits:
    gate, up = np.split(x, 2, axis=1)
    one = np.full_like(up, narrow(np.ones(1, np.float32))[0])
    silu: F32 = widen(plain.swiglu(np.concatenate([gate, one], axis=1)))
    return narrow(silu * widen(up))
