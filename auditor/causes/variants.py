"""The same weights in a model that is not quite the same: another epsilon, a window, keys and values in eight bits."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.causes.other_models import nearest_model
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I32, Bits, Reference

_EPSILONS: Final = (1e-6, 1e-5, 1e-8, 1e-12, 1e-4, 1e-3)
_WINDOWS: Final = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class Windowed(Reference):
    """The reference, in which every query sees its last `window` keys only."""

    window: int = 0

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's up to the window, then row by row, on one sequence."""
        whole = min(self.window, len(q))
        cu = np.array([0, whole], np.int32)
        parts = [Reference.attention(self, q[:whole], k[:whole].copy(), v[:whole].copy(), cu, cu)]
        one, seen = np.array([0, 1], np.int32), np.array([0, self.window], np.int32)
        for row in range(whole, len(q)):
            keys = slice(row + 1 - self.window, row + 1)
            parts.append(Reference.attention(self, q[row : row + 1], k[keys].copy(), v[keys].copy(), one, seen))
        out, m, l = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return out, m, l


@dataclass(frozen=True, slots=True)
class CoarseKv(Reference):
    """The reference on keys and values of fewer bits of mantissa."""

    mantissa: int = 7

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's."""
        return Reference.attention(self, q, self._rounded(k), self._rounded(v), cu_q, cu_k)

    def _rounded(self, bits: Bits) -> Bits:
        drop = 7 - self.mantissa
        wide = bits.astype(np.uint32)
        nearest = wide + (1 << drop - 1) - 1 + (wide >> drop & 1)
        return (nearest >> drop << drop).astype(np.uint16)


def other_model(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """What explains most of the difference is named."""
    if best := nearest_model(evidence, oracle, _variants(oracle)):
        yield best


def _variants(oracle: Oracle) -> Iterator[tuple[str, str, Decoder]]:
    decoder, settings = oracle.decoder, _settings(oracle.decoder.reference)
    for mantissa, name in ((3, "E4M3"), (2, "E5M2")):
        coarse = CoarseKv(**settings, mantissa=mantissa)
        yield "kv_precision", f"keys and values in 8 bits ({name})", oracle.with_reference(coarse)
    for epsilon in _EPSILONS:
        if epsilon != decoder.config.rms_norm_eps:
            config = replace(decoder.config, rms_norm_eps=epsilon)
            name = f"norms with epsilon {epsilon:g} (config: {decoder.config.rms_norm_eps:g})"
            yield "model_config", name, replace(decoder, config=config)
    for size in _WINDOWS:
        if size < len(oracle.tokens):
            sees = Windowed(**settings, window=size)
            yield "attention_mask", f"an attention that sees {size} tokens back", oracle.with_reference(sees)


def _settings(reference: Reference) -> dict[str, Any]:
    return {f.name: getattr(reference, f.name) for f in fields(Reference)}
