"""Another order of summation: split-K, a batch-dependent kernel, another tree. Small, flat, everywhere."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from auditor.causes.evidence import CERTAIN, Evidence, Suggestion, bits_hit, explained, worth_saying
from auditor.causes.oracle import Oracle
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, Bits, Reference

_PARTS = (2, 4, 8, 16)
_LAST_BITS = 0.05


@dataclass(frozen=True, slots=True)
class SplitK(Reference):
    """The reference with every product cut along K where it divides, as GPU libraries do it for few rows."""

    parts: int = 1

    @classmethod
    def like(cls, reference: Reference, parts: int) -> "SplitK":
        """`reference` with its products cut in `parts`."""
        return cls(**{field.name: getattr(reference, field.name) for field in fields(Reference)}, parts=parts)

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As the reference's, in `parts` segments."""
        return Reference.gemm(self, x, w, segments=self._cut(w, segments))

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        """As the reference's, in `parts` segments."""
        return Reference.gemm_fp32(self, x, w, segments=self._cut(w, segments))

    def _cut(self, w: Bits, segments: int) -> int:
        return self.parts if w.shape[1] % self.parts == 0 else segments


def split_sums(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Row-parallel sums in another number of parts than the contract's, or every product cut along K."""
    if np.abs(evidence.delta).max() > 1.0:
        return
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    best: tuple[float, str] | None = None
    for name, decoder in _variants(oracle):
        predicted = oracle.logprobs(decoder)
        score = explained(found, truth, predicted, active)
        if worth_saying(score) and (best is None or score > best[0]):
            best = (score, f"the values are those of {name}; {bits_hit(found, predicted, active)}")
            if score >= CERTAIN:
                break
    if best is not None:
        yield Suggestion("reduction_order", best[0], best[1])


def flat_last_bits(evidence: Evidence) -> Iterator[Suggestion]:
    """Small differences at many tokens, of both signs, that neither grow nor cluster."""
    delta = evidence.delta[evidence.active]
    differing = delta[delta != 0.0]
    if differing.size == 0 or np.abs(delta).max() > 0.25 or np.median(np.abs(differing)) > _LAST_BITS:
        return
    both_signs = min((differing > 0).mean(), (differing < 0).mean()) > 0.1
    halves = [np.abs(half).mean() for half in np.array_split(delta, 2)]
    flat = max(halves) < 4.0 * max(min(halves), 1e-12)
    score = 0.3 + 0.1 * both_signs + 0.1 * flat + 0.05 * (differing.size > 0.5 * delta.size)
    yield Suggestion(
        "reduction_order",
        score,
        f"{differing.size} of {delta.size} tokens differ, by {np.median(np.abs(differing)):.3g} in the median and"
        f" {np.abs(delta).max():.3g} at most, {'of both signs' if both_signs else 'mostly of one sign'}, "
        + ("evenly along the response" if flat else "unevenly along the response"),
    )


def _variants(oracle: Oracle) -> Iterator[tuple[str, Decoder]]:
    own = oracle.decoder.contract.segments
    for parts in (1, *_PARTS):
        if parts != own:
            yield f"o_proj and down_proj summed in {parts} parts, not the contract's {own}", oracle.with_segments(parts)
    for parts in _PARTS:
        split = SplitK.like(oracle.decoder.reference, parts)
        yield f"every product summed in {parts} parts", oracle.with_reference(split)
