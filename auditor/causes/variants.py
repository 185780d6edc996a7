"""The same weights in a model that is not quite the same: another epsilon, a window, keys and values in eight bits."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.causes.other_models import nearest_model
from rl_kernel.reference import _reference
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference, narrow, widen

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


@dataclass(frozen=True, slots=True)
class OtherScale(Reference):
    """The reference, whose scores are multiplied by another number than one over the root of the head's dimension."""

    scale: float = 1.0

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's."""
        out = np.empty_like(q)
        m, l = np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
        scale = np.float32(np.log2(np.e) * self.scale)
        _reference.attention(out, m, l, q, k, v, cu_q, cu_k, scale, self.kv_partial, self.mma, self.exp2_model)
        return out, m, l


@dataclass(frozen=True, slots=True)
class OtherHeads(Reference):
    """The reference, whose neighbouring query heads read different key heads."""

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's: keys and values are given to each query head by the wrong rule."""
        mine = np.arange(q.shape[1]) % k.shape[1]
        return Reference.attention(self, q, k[:, mine].copy(), v[:, mine].copy(), cu_q, cu_k)


@dataclass(frozen=True, slots=True)
class Interleaved(Reference):
    """The reference, which rotates values 2i and 2i + 1 together."""

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """As the reference's, between two changes of order."""
        tokens, heads, dim = x.shape
        halves = x.reshape(tokens, heads, dim // 2, 2).swapaxes(2, 3).reshape(x.shape)
        turned = Reference.rope(self, np.ascontiguousarray(halves), cos, sin, positions, inverse=inverse)
        return np.ascontiguousarray(turned.reshape(tokens, heads, 2, dim // 2).swapaxes(2, 3).reshape(x.shape))


def other_model(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """What explains most of the difference is named."""
    if best := nearest_model(evidence, oracle, _variants(oracle)):
        yield best


def _variants(oracle: Oracle) -> Iterator[tuple[str, str, Decoder]]:
    """Cause, name and decoder; what is common before what is rare."""
    decoder, settings = oracle.decoder, _settings(oracle.decoder.reference)
    for mantissa, name in ((3, "E4M3"), (2, "E5M2")):
        coarse = CoarseKv(**settings, mantissa=mantissa)
        yield "kv_precision", f"keys and values in 8 bits ({name})", oracle.with_reference(coarse)
    for epsilon in _EPSILONS:
        if epsilon != decoder.config.rms_norm_eps:
            config = replace(decoder.config, rms_norm_eps=epsilon)
            name = f"norms with epsilon {epsilon:g} (config: {decoder.config.rms_norm_eps:g})"
            yield "model_config", name, replace(decoder, config=config)
    yield from _other_heads(oracle)
    for name, rounded in (("bf16", _in_bf16), ("fp16", _in_fp16)):
        cos, sin = (rounded(table[: len(oracle.tokens)]) for table in decoder.rope)
        yield "rope_precision", f"a rotary table in {name}", replace(decoder, rope=(cos, sin))
    layers = decoder.config.layers
    for count in dict.fromkeys((1, layers // 4, layers // 2, layers - 1)):
        if 0 < count < layers:
            cut = replace(decoder, config=replace(decoder.config, layers=count))
            yield "model_config", f"the first {count} of {layers} layers, as a draft model's", cut
    for size in _WINDOWS:
        if size < len(oracle.tokens):
            sees = Windowed(**settings, window=size)
            yield "attention_mask", f"an attention that sees {size} tokens back", oracle.with_reference(sees)


def _other_heads(oracle: Oracle) -> Iterator[tuple[str, str, Decoder]]:
    """Heads that are scaled, grouped or rotated by another rule."""
    config, settings = oracle.decoder.config, _settings(oracle.decoder.reference)
    dim = config.head_dim
    for root, name in ((config.hidden / config.heads, "hidden / heads"), (1.0, "1"), (dim * dim, "its square")):
        if root != dim:
            scaled = OtherScale(**settings, scale=float(root) ** -0.5)
            said = f"scores divided by the root of {name}, not of the head's {dim}"
            yield "model_config", said, oracle.with_reference(scaled)
    if 1 < config.kv_heads < config.heads:
        yield "model_config", "query heads in other groups", oracle.with_reference(OtherHeads(**settings))
    yield "model_config", "a rotation of neighbouring values", oracle.with_reference(Interleaved(**settings))


def _in_bf16(table: F32) -> F32:
    return widen(narrow(table))


def _in_fp16(table: F32) -> F32:
    return table.astype(np.float16).astype(np.float32)


def _settings(reference: Reference) -> dict[str, Any]:
    return {f.name: getattr(reference, f.name) for f in fields(Reference)}
