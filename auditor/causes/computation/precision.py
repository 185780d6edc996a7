"""Fewer bits somewhere in the forward: which values, in which format, and over what a scale is shared.

The three are combined; effects of one format at one place are all of one size, so that one trial rules most out.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import numpy as np

from auditor.causes.context.slots import asked
from auditor.causes.edits import Edit
from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.causes.search import Model, nearest_model
from auditor.causes.weights.mixture import measured_of
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I32, Bits, Reference, narrow, widen

Rounding = Callable[[F32], F32]
Coarse = Callable[[Bits], Bits]

_LEAST: Final = np.float32(1e-12)
_LARGEST: Final = 1 << 28  # bytes of weights of which copies are made


def _e4m3(x: F32) -> F32:
    return _float8(x, 3, -6, 448.0)


def _e5m2(x: F32) -> F32:
    return _float8(x, 2, -14, 57344.0)


def _float8(x: F32, mantissa: int, smallest: int, largest: float) -> F32:
    """To the nearest value with so many bits of mantissa, ties to even; below 2^smallest the steps stay equal.

    Read off a table by 16 bits, of which the last one says whether anything stands behind them.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    codes = (bits >> 16) | ((bits & 0xFFFF) != 0)
    nearest: F32 = _float8_by_code(mantissa, smallest, largest)[codes]
    return nearest


@cache
def _float8_by_code(mantissa: int, smallest: int, largest: float) -> F32:
    codes: F32 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return nearest_float8(codes, mantissa, smallest, largest)


def nearest_float8(x: F32, mantissa: int, smallest: int, largest: float) -> F32:
    """As it is defined, with arithmetic."""
    drop = np.uint32(23 - mantissa)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
    normal = ((bits + half + (bits >> drop & np.uint32(1))) >> drop << drop).view(np.float32)
    step = np.float32(2.0 ** (smallest - mantissa))
    nearest: F32 = np.where(np.abs(x) < np.float32(2.0**smallest), np.rint(x / step) * step, normal)
    return np.clip(nearest, -largest, largest)


FORMATS: Final[tuple[tuple[str, Rounding, float], ...]] = (
    ("FP8 (E4M3)", _e4m3, 448.0),
    ("8-bit integers", np.rint, 127.0),
    ("FP8 (E5M2)", _e5m2, 57344.0),
    ("8-bit integers with a zero point", np.rint, 255.0),
    ("4-bit integers", np.rint, 7.0),
    ("4-bit integers with a zero point", np.rint, 15.0),
)
_WHOLE: Final = ("a head", "a channel", "a tensor")  # scales that all tokens share
_COARSE: Final = (7.0, 15.0)  # limits of what only weights and caches are held in
_WITH_ZERO: Final = (255.0, 15.0)
# Over which axes of keys [T,G,D], and of activations or weights [rows,K], a scale is shared; or how many of a row do.
OF_KEYS: Final[tuple[tuple[str, Any], ...]] = (
    ("a token and head", (2,)), ("a token", (1, 2)), ("a head", (0, 2)), ("a channel", (0,)), ("a tensor", (0, 1, 2)),
    ("a block of 16 tokens and head", 16),
)  # fmt: skip
OF_ROWS: Final[tuple[tuple[str, Any], ...]] = (("a row", (1,)), ("a tensor", (0, 1)), ("128", 128))
_FINE: Final[tuple[tuple[str, Any], ...]] = (("32", 32), ("64", 64))


def _cut(mantissa: int, half: int) -> Coarse:
    """So many bits of mantissa kept, of bf16's seven; half: what is added before, 0 cuts towards zero."""
    drop = 7 - mantissa

    def rounded(bits: Bits) -> Bits:
        return ((bits.astype(np.uint32) + (half << drop - 1)) >> drop << drop).astype(np.uint16)

    return rounded


CASTS: Final[tuple[tuple[str, Coarse], ...]] = (
    ("in FP8 (E4M3) without a scale", lambda bits: narrow(_e4m3(widen(bits)))),
    ("in FP8 (E5M2) without a scale", lambda bits: narrow(_e5m2(widen(bits)))),
    *(
        (f"cut to {m} bits of mantissa{', half rounded up' if half else ''}", _cut(m, half))
        for m in (5, 4, 3, 2)
        for half in (1, 0)
    ),
)


def coarse(rounding: Rounding, limit: float, over: Any) -> Coarse:
    """bf16 → bf16, rounded with one scale over the given axes, or over groups of so many values of a row."""

    def rounded(bits: Bits) -> Bits:
        x = widen(bits)
        if not isinstance(over, int):
            return narrow(_scaled(x, over, rounding, limit))
        if x.ndim == 3:  # so many tokens, of each head
            padded = np.pad(x, ((0, -len(x) % over), (0, 0), (0, 0))).reshape(-1, over, *x.shape[1:])
            return narrow(_scaled(padded, (1, 3), rounding, limit).reshape(-1, *x.shape[1:])[: len(x)])
        padded = np.pad(x, ((0, 0), (0, -x.shape[1] % over))).reshape(len(x), -1, over)
        return narrow(_scaled(padded, (2,), rounding, limit).reshape(len(x), -1)[:, : x.shape[1]])

    return rounded


def _scaled(x: F32, axes: tuple[int, ...], rounding: Rounding, limit: float) -> F32:
    if limit in _WITH_ZERO:
        low, high = x.min(axis=axes, keepdims=True), x.max(axis=axes, keepdims=True)
        scale = np.maximum(high - low, _LEAST) / np.float32(limit)
        shifted: F32 = (rounding(((x - low) / scale).astype(np.float32)) * scale + low).astype(np.float32)
        return shifted
    scale = np.maximum(np.abs(x).max(axis=axes, keepdims=True), _LEAST) / np.float32(limit)
    result: F32 = (rounding((x / scale).astype(np.float32)) * scale).astype(np.float32)
    return result


def low_precision(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Keys and values, products, or weights alone in fewer bits; a rotary table in 16."""
    if evidence.begins is not None:
        return  # nothing is held in fewer bits from some token on
    measured = measured_of(evidence, oracle)
    of_caches = _caches(oracle.decoder) if asked(evidence, oracle)[1] is None else ()
    of_products = _products(oracle.decoder) if measured is None or measured.response is None else ()
    if best := nearest_model(evidence, oracle, (*of_caches, *_of_attention(oracle.decoder), *of_products)):
        yield best


def _caches(decoder: Decoder) -> Iterator[Model]:
    """What `stored` finds where a model is too large for that."""
    for name, cast in CASTS:
        edit = Edit("attention", coarse_keys(cast, True, True))
        yield Model.of(decoder, "kv_precision", f"keys and values {name}", edit)
    for format_, to, limit in FORMATS:
        for over, axes in OF_KEYS:
            rounded = coarse(to, limit, axes)
            for what, keys, values in (("keys and values", True, True), ("keys", True, False), ("values", False, True)):
                edit = Edit("attention", coarse_keys(rounded, keys, values))
                name = f"{what} in {format_} with a scale {over}"
                whole = over in _WHOLE
                yield Model.of(decoder, "kv_precision", name, edit, f"{what} {limit}", whole=whole)


def _of_attention(decoder: Decoder) -> Iterator[Model]:
    for format_, to, limit in FORMATS:
        alike = Edit("attention", _coarse_attention(coarse(to, limit, (2,))))
        yield Model.of(decoder, "activation_precision", f"queries, keys and values in {format_}", alike)


def _products(decoder: Decoder) -> Iterator[Model]:
    """Weights, activations, or both: what `activations` and `rounded` find where the first order tells."""
    if sum(weight.nbytes for weight in decoder.weights.values()) > _LARGEST:
        return
    for format_, to, limit in FORMATS:
        for over, axes in (*_FINE, *OF_ROWS):
            of_weights = _remembered(coarse(to, limit, axes))
            name = f"matrices in {format_} with a scale {_for(over)}"
            edit = Edit("gemm", product_of(None, of_weights))
            yield Model.of(decoder, "weight_precision", name, edit, f"weights {limit}")
            for share, axes_in in OF_ROWS if limit not in _COARSE else ():
                both = Edit("gemm", product_of(coarse(to, limit, axes_in), of_weights))
                said = (
                    f"products in {format_}, with a scale {_for(over)} of the weights and {_for(share)} of the inputs"
                )
                yield Model.of(decoder, "activation_precision", said, both, f"products {limit}", whole=share in _WHOLE)
        if limit not in _COARSE:
            for over, axes in OF_ROWS:
                alone = Edit("gemm", product_of(coarse(to, limit, axes), None))
                said = f"inputs of products in {format_} with a scale {_for(over)}"
                yield Model.of(decoder, "activation_precision", said, alone, f"inputs {limit}", whole=over in _WHOLE)


def _for(over: str) -> str:
    return f"for {over} values of a row" if over.isdigit() else over


def _remembered(change: Coarse) -> Coarse:
    """Each matrix is rounded once; arrays of weights outlive the search."""
    by_id: dict[int, Bits] = {}

    def rounded(w: Bits) -> Bits:
        if id(w) not in by_id:
            by_id[id(w)] = change(w)
        return by_id[id(w)]

    return rounded


def coarse_keys(rounded: Coarse, keys: bool, values: bool) -> Callable[..., Any]:
    """Attention on rounded keys, values, or both."""

    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        return plain.attention(q, rounded(k) if keys else k, rounded(v) if values else v, cu_q, cu_k)

    return attention


def _coarse_attention(rounded: Coarse) -> Callable[..., Any]:
    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        return plain.attention(rounded(q), rounded(k), rounded(v), cu_q, cu_k)

    return attention


def product_of(of_inputs: Coarse | None, of_weights: Coarse | None) -> Callable[..., Any]:
    """Products of rounded inputs, of rounded weights, or of both."""

    def gemm(plain: Reference, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        return plain.gemm(of_inputs(x) if of_inputs else x, of_weights(w) if of_weights else w, segments=segments)

    return gemm
