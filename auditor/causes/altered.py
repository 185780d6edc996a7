"""The named version's weights, changed on their way: in each other's place, rounded, or added too often."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import Oracle, VersionUnavailable
from auditor.causes.other_models import nearest_model
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, Bits, narrow, widen

_SWAPPED: Final = (("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj"),
                   ("input_layernorm", "post_attention_layernorm"))  # fmt: skip
_SHARES: Final = (2.0, 0.5, 4.0, 8.0, 0.25, 16.0)
_ONE: Final = 0x3F80
_LARGEST: Final = 1 << 30  # bytes of weights


def altered_weights(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """What explains most of the difference is named; not on a model of which copies would fill the memory."""
    if sum(weight.nbytes for weight in oracle.decoder.weights.values()) > _LARGEST:
        return
    if best := nearest_model(evidence, oracle, _altered(evidence, oracle)):
        yield best


def _altered(evidence: Evidence, oracle: Oracle) -> Iterator[tuple[str, str, Decoder]]:
    """Cause, name and decoder."""
    decoder = oracle.decoder
    for first, second in _SWAPPED:
        swapped = _swapped(decoder.weights, first, second)
        if all(value.shape == decoder.weights[name].shape for name, value in swapped.items()):
            yield "other_weights", f"{first} and {second} in each other's place", replace(decoder, weights=swapped)
    if decoder.config.qk_norm:
        ones = {n: np.full_like(w, _ONE) if "q_norm" in n or "k_norm" in n else w for n, w in decoder.weights.items()}
        yield "model_config", "a model whose queries' and keys' norms have no weights", replace(decoder, weights=ones)
    for name, rounded in _ROUNDINGS:
        coarse = {n: rounded(w) if "_proj." in n else w for n, w in decoder.weights.items()}
        yield "weight_precision", f"matrices {name}", replace(decoder, weights=coarse)
    yield from _adapters(evidence, oracle)


def _adapters(evidence: Evidence, oracle: Oracle) -> Iterator[tuple[str, str, Decoder]]:
    """The change since an earlier version, as an adapter is, added in another strength than once."""
    stated = evidence.record.weight_version
    before = [version for version in sorted(oracle.versions) if version < stated]
    for version in dict.fromkeys([*before[:1], *before[-1:]]):
        try:
            base = oracle.version(version).weights
        except VersionUnavailable:
            continue
        for share in _SHARES:
            weights = {n: _moved(base[n], w, share) for n, w in oracle.decoder.weights.items()}
            name = f"version {version} with {share:g} times what came since"
            yield "adapter_scale", name, replace(oracle.decoder, weights=weights)


def _moved(base: Bits, now: Bits, share: float) -> Bits:
    start = widen(base)
    return narrow(start + np.float32(share) * (widen(now) - start))


def _swapped(weights: dict[str, Bits], first: str, second: str) -> dict[str, Bits]:
    other = {name: name.replace(first, second) if first in name else name.replace(second, first) for name in weights}
    return {name: weights[other[name]] for name in weights}


def _in_fp8(w: Bits, axis: int | None) -> Bits:
    """FP8 E4M3 with a scale a row, or one for the whole matrix."""
    wide = widen(w)
    largest: npt.NDArray[np.float32] = np.abs(wide).max(axis=axis, keepdims=True)
    scale = np.maximum(largest, np.float32(1e-12)) / np.float32(448)
    return narrow(_e4m3((wide / scale).astype(np.float32)) * scale)


def _in_int8(w: Bits, axis: int | None) -> Bits:
    wide = widen(w)
    scale = np.maximum(np.abs(wide).max(axis=axis, keepdims=True), np.float32(1e-12)) / np.float32(127)
    return narrow(np.rint(wide / scale).astype(np.float32) * scale)


def _e4m3(x: F32) -> F32:
    """To the nearest value of E4M3, ties to even."""
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(x), np.float32(2.0**-6)))) - 3)
    nearest: F32 = np.clip(np.rint(x / step) * step, -448, 448).astype(np.float32)
    return nearest


_ROUNDINGS: Final[tuple[tuple[str, Callable[[Bits], Bits]], ...]] = (
    ("in FP8 with a scale a row", lambda w: _in_fp8(w, 1)),
    ("in FP8 with one scale", lambda w: _in_fp8(w, None)),
    ("in 8-bit integers with a scale a row", lambda w: _in_int8(w, 1)),
    ("in 8-bit integers with one scale", lambda w: _in_int8(w, None)),
)
