"""The reference with one op changed as engines change it: what is tried where no whole engine's ops give the bits.

A fault in an engine that else keeps the contract is one op: a product in other parts, a head in bf16, scaled rotations,
or one op of a stock engine. Each is tried for one forward, the common ones first.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np

from auditor.causes.context.scalings import FACTORS, THETAS
from auditor.causes.edits import Edit, edited
from auditor.errors import ConfigError
from auditor.replay.engines import load_ops
from auditor.replay.watch import OPS, Mixed
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I64, Bits, Reference, narrow, widen

Make = Callable[[], object]
_PARTS: Final = (2, 4, 8, 16, 3, 5, 6)
_ROUNDING: Final = 0.2  # a mean |Δ| that no order of sums reaches
_PRODUCTS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ENGINES: Final = ("native", "native-vllm", "native-vllm-alone")


def changed(decoder: Decoder, prompt_len: int, away: float) -> Iterator[tuple[str, Make]]:
    """What is tried, by a name for people. away: the reference's mean |Δ| from the reported values."""
    for name, kind in (("logits rounded to bf16", Bf16Logits), ("log-probabilities rounded to bf16", Bf16Values)):
        yield name, partial(kind, decoder.reference)
    yield from _of_engines(decoder, prompt_len)
    yield from _rotations(decoder)
    if away < _ROUNDING:
        yield from _products(decoder)


def _rotations(decoder: Decoder) -> Iterator[tuple[str, Make]]:
    for factor in FACTORS:
        yield f"RoPE scaled linearly by {factor:g}", _edit(decoder, Edit("rope", _scaled(decoder, 1.0 / factor)))
    for theta in THETAS:
        if theta != decoder.config.rope_theta:
            yield f"RoPE base {theta:g}", _edit(decoder, Edit("rope", _rebased(decoder, theta)))


def _products(decoder: Decoder) -> Iterator[tuple[str, Make]]:
    """All at once, then one of a layer's in all layers, then a single one."""
    for parts in _PARTS:
        yield f"every product in {parts} parts", _edit(decoder, Edit("gemm", _split(parts)))
    for parts in _PARTS[:3]:
        for at, product in enumerate(_PRODUCTS):
            every = ((layer, at) for layer in range(decoder.config.layers))
            yield f"{product} in {parts} parts", _edit(decoder, Edit("gemm", _split(parts)).at(*every))
    for parts in _PARTS[:2]:
        for layer in range(decoder.config.layers):
            for at, product in enumerate(_PRODUCTS):
                name = f"{product} of layer {layer} in {parts} parts"
                yield name, _edit(decoder, Edit("gemm", _split(parts)).at((layer, at)))


class _Head:
    """The reference with another output: everything but `linear_logp` is its own."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reference, name)


class Bf16Logits(_Head):
    """Logits pass through bf16."""

    def linear_logp(self, h: Bits, w: Bits, target: I64, *, temperature: float, vocab: int) -> tuple[F32, F32]:
        """h[T,K], w[V,K], target[T] → logp[T], lse[T]."""
        logits = widen(narrow(self._reference.gemm_fp32(h, w)))
        heat = np.full(len(h), temperature, np.float32)
        logp, lse = self._reference.logp_from_logits(logits, target[:, None], heat, vocab=vocab)
        return logp[:, 0], lse


class Bf16Values(_Head):
    """Log-probabilities pass through bf16."""

    def linear_logp(self, h: Bits, w: Bits, target: I64, *, temperature: float, vocab: int) -> tuple[F32, F32]:
        """h[T,K], w[V,K], target[T] → logp[T], lse[T]."""
        logp, lse = self._reference.linear_logp(h, w, target, temperature=temperature, vocab=vocab)
        return widen(narrow(logp)), lse


def _of_engines(decoder: Decoder, prompt_len: int) -> Iterator[tuple[str, Make]]:
    """One op of a stock engine, in a model whose other ops are the reference's."""
    for engine in _ENGINES:
        try:
            make = load_ops(engine, decoder, prompt_len)
        except ConfigError:
            continue  # said before, where whole engines were tried
        for op in OPS:
            yield f"{op} of {engine}", partial(_one_op, make, decoder.reference, op)


def _one_op(make: Make, reference: Reference, op: str) -> Mixed:
    return Mixed(make(), reference, frozenset(OPS) - {op})


def _edit(decoder: Decoder, edit: Edit) -> Make:
    return lambda: edited(decoder, edit).reference


def _split(parts: int) -> Callable[..., Bits]:
    """Cut along K in parts of nearly one length, added left to right."""

    def gemm(plain: Reference, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        edges = [round(i * x.shape[1] / parts) for i in range(parts + 1)]
        sums = [
            plain.gemm_fp32(np.ascontiguousarray(x[:, a:b]), np.ascontiguousarray(w[:, a:b]))
            for a, b in pairwise(edges)
        ]
        total: F32 = sums[0]
        for part in sums[1:]:
            total = total + part
        return narrow(total)

    return gemm


def _scaled(decoder: Decoder, share: float) -> Callable[..., Bits]:
    config = decoder.config
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    return _turned(decoder, share * np.float64(config.rope_theta) ** -half)


def _rebased(decoder: Decoder, theta: float) -> Callable[..., Bits]:
    half = np.arange(0, decoder.config.head_dim, 2, dtype=np.float64) / decoder.config.head_dim
    return _turned(decoder, np.float64(theta) ** -half)


def _turned(decoder: Decoder, frequencies: np.ndarray) -> Callable[..., Bits]:
    def rope(plain: Reference, x: Bits, cos: F32, sin: F32, positions: I64, **_: Any) -> Bits:
        angle = np.arange(int(positions.max()) + 1)[:, None] * frequencies[None]
        return plain.rope(x, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), positions)

    return rope
