"""The same weights in a model that is not quite the same: another epsilon, scale or rotation, layers left out."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from auditor.causes.computation.constants import scaled
from auditor.causes.context.seen import some_layers
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.causes.search import Model, nearest_model
from rl_kernel.reference.config import DecoderConfig
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference, narrow, widen

_EPSILONS: Final = (1e-6, 1e-5, 1e-8, 1e-12, 1e-4, 1e-3)


def other_model(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """What explains most of the difference is named."""
    if best := nearest_model(evidence, oracle, _models(oracle)):
        yield best


def _models(oracle: Oracle) -> Iterator[Model]:
    """What is common before what is rare."""
    decoder, config = oracle.decoder, oracle.decoder.config
    for epsilon in _EPSILONS:
        if epsilon != config.rms_norm_eps:
            name = f"norms with epsilon {epsilon:g} (config: {config.rms_norm_eps:g})"
            yield Model.of(
                decoder, "model_config", name, Edit("rms_norm", _with_epsilon(epsilon)), apart=epsilon == 1e-4
            )
    for op, name, change in _edits(decoder):
        edit = Edit(op, change)
        yield Model.of(decoder, "model_config", name, edit)
        for layers in some_layers(config.layers) if op == "rope" else ():
            there = edit.at(*((layer, call) for layer in layers for call in (0, 1)))
            said = f"{name}, in layers {', '.join(map(str, layers))}"
            yield Model("model_config", said, edited(decoder, there))
    if config.qk_norm:
        name = "queries and keys that are rotated first and normalised then"
        yield Model("model_config", name, edited(decoder, *_norms_behind_rotations()))
    for name, rope in _coarse_tables(oracle):
        yield Model("rope_precision", name, replace(decoder, rope=rope))
    for count in dict.fromkeys((1, config.layers // 4, config.layers // 2, config.layers - 1)):
        if 0 < count < config.layers:
            cut = replace(decoder, config=replace(config, layers=count))
            yield Model("model_config", f"the first {count} of {config.layers} layers, as a draft model's", cut)
    for name, change_of in _reweighted(decoder):
        weights = {n: change_of(n, w) for n, w in decoder.weights.items()}
        yield Model("model_config", name, replace(decoder, weights=weights))


def _coarse_tables(oracle: Oracle) -> Iterator[tuple[str, tuple[F32, F32]]]:
    """A rotary table, or what it is made of, in 16 bits."""
    count = len(oracle.tokens)
    where, turns = np.arange(count, dtype=np.float32)[:, None], oracle.frequencies.astype(np.float32)[None, :]
    for name, rounded in (("bf16", _in_bf16), ("fp16", _in_fp16)):
        cos, sin = (rounded(table[:count]) for table in oracle.decoder.rope)
        yield f"a rotary table in {name}", (cos, sin)
        made = (
            ("frequencies", where.astype(np.float64) * rounded(turns)),
            ("angles", rounded(where * turns)),
            ("positions", rounded(where) * oracle.frequencies),
            ("positions and frequencies, and their product,", rounded(rounded(where) * rounded(turns))),
        )
        for what, angle in made:
            table = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
            yield f"a rotary table of {what} in {name}", table
            if what != "frequencies":
                yield f"a rotary table of {what} in {name}, itself in it, too", (rounded(table[0]), rounded(table[1]))


def _edits(decoder: Decoder) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Op, what it does, and how."""
    config, dim = decoder.config, decoder.config.head_dim
    for root, name in ((config.hidden / config.heads, "hidden / heads"), (1.0, "1"), (dim * dim, "its square")):
        if root != dim:
            said = f"scores divided by the root of {name}, not of the head's {dim}"
            yield "attention", said, scaled(float(root) ** -0.5)
    if 1 < config.kv_heads < config.heads:
        yield "attention", "query heads in other groups", _regrouped
    yield "rope", "a rotation of neighbouring values", _interleaved
    yield "rope", "queries and keys that are not rotated", lambda plain, x, cos, sin, positions: x
    for share in (0.5, 0.25, 0.75):
        if turned := round(share * dim / 2):
            yield "rope", f"a rotation of {share:g} of each head", _partly_rotated(config, turned)
    yield "swiglu", "GELU for SiLU", _gelu
    yield "swiglu", "ReLU for SiLU", partial(_activated, lambda gate: np.maximum(gate, 0))
    yield "swiglu", "the square of ReLU for SiLU", partial(_activated, lambda gate: np.maximum(gate, 0) ** 2)
    yield "swiglu", "no activation", partial(_activated, lambda gate: gate)
    yield "rms_norm", "norms that take the mean off", _centred
    if config.qk_norm:
        yield "rms_norm", "norms of queries and keys over all heads together", _over_heads
    yield "residual_add", "a block that adds nothing", lambda plain, block, stream: stream
    yield "residual_add", "a block without its residual", lambda plain, block, stream: block


def _reweighted(decoder: Decoder) -> Iterator[tuple[str, Callable[[str, Bits], Bits]]]:
    """Weights as another model would read them."""
    of_heads = ("q_norm", "k_norm") if decoder.config.qk_norm else ()
    norms = {
        "all norms": ("norm",), "norms of hidden states": ("layernorm", "model.norm"), "the last norm": ("model.norm",),
        "norms before attention": ("input_layernorm",), "norms behind attention": ("post_attention_layernorm",),
        **({"queries' and keys' norms": of_heads} if of_heads else {}), **{f"{name}s": (name,) for name in of_heads},
    }  # fmt: skip
    for where, names in norms.items():
        yield f"{where} without weights", partial(_in_norms, names, np.float32(0.0), np.float32(1.0))
        yield f"one added to the weights of {where}", partial(_in_norms, names, np.float32(1.0), np.float32(1.0))
        yield f"one taken from the weights of {where}", partial(_in_norms, names, np.float32(1.0), np.float32(-1.0))
    root = np.float32(np.sqrt(decoder.config.hidden))
    yield "embeddings times the root of hidden", lambda n, w: narrow(widen(w) * root) if "embed" in n else w
    if not decoder.config.tied:
        tied = decoder.weights["model.embed_tokens.weight"]
        yield "the embedding as output layer", lambda n, w: tied if n == "lm_head.weight" else w


def _in_norms(names: tuple[str, ...], times: np.float32, more: np.float32, name: str, weight: Bits) -> Bits:
    return narrow(widen(weight) * times + more) if any(part in name for part in names) else weight


def _with_epsilon(epsilon: float) -> Callable[..., Any]:
    return lambda plain, x, w, eps: plain.rms_norm(x, w, epsilon)


def _regrouped(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
    """Neighbouring query heads read different key heads."""
    mine = np.arange(q.shape[1]) % k.shape[1]
    return plain.attention(q, k[:, mine].copy(), v[:, mine].copy(), cu_q, cu_k)


def _interleaved(plain: Reference, x: Bits, cos: F32, sin: F32, positions: I64) -> Bits:
    """Values 2i and 2i + 1 are rotated together."""
    order = np.r_[0 : x.shape[2] : 2, 1 : x.shape[2] : 2]
    turned = plain.rope(np.ascontiguousarray(x[:, :, order]), cos, sin, positions)
    return np.ascontiguousarray(turned[:, :, np.argsort(order)])


def _partly_rotated(config: DecoderConfig, pairs: int) -> Callable[..., Any]:
    """So many pairs at the beginning of each head, by the frequencies of a head of that size."""
    frequencies = np.float64(config.rope_theta) ** (-np.arange(pairs, dtype=np.float64) / pairs)

    def rope(plain: Reference, x: Bits, cos: F32, sin: F32, positions: I64) -> Bits:
        angle = np.arange(int(positions.max()) + 1, dtype=np.float64)[:, None] * frequencies[None, :]
        table = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        turned = plain.rope(x[:, :, : 2 * pairs].copy(), *table, positions)
        return np.concatenate([turned, x[:, :, 2 * pairs :]], axis=2)

    return rope


def _norms_behind_rotations() -> tuple[Edit, Edit]:
    """The heads' norms wait for the rotations, which are called in their order."""
    waiting: list[tuple[Bits, float]] = []

    def rms_norm(plain: Reference, x: Bits, w: Bits, eps: float) -> Bits:
        if x.ndim == 2:
            return plain.rms_norm(x, w, eps)
        waiting.append((w, eps))
        return x

    def rope(plain: Reference, x: Bits, cos: F32, sin: F32, positions: I64) -> Bits:
        return plain.rms_norm(plain.rope(x, cos, sin, positions), *waiting.pop(0))

    return Edit("rms_norm", rms_norm), Edit("rope", rope)


def _activated(activation: Callable[[F32], F32], plain: Reference, x: Bits) -> Bits:
    gate, up = (widen(part) for part in np.split(x, 2, axis=1))
    return narrow((activation(gate) * up).astype(np.float32))


def _centred(plain: Reference, x: Bits, w: Bits, eps: float) -> Bits:
    wide = widen(x)
    return plain.rms_norm(narrow(wide - wide.mean(axis=-1, keepdims=True)), w, eps)


def _over_heads(plain: Reference, x: Bits, w: Bits, eps: float) -> Bits:
    if x.ndim == 2:
        return plain.rms_norm(x, w, eps)
    wide = widen(x)
    inverse = 1 / np.sqrt((wide * wide).mean(axis=(1, 2), keepdims=True) + np.float32(eps))
    return narrow((wide * inverse * widen(w)).astype(np.float32))


def _gelu(plain: Reference, x: Bits) -> Bits:
    gate, up = (widen(part) for part in np.split(x, 2, axis=1))
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
    return narrow(np.float32(0.5) * gate * (1 + np.tanh(inner)) * up)


def _in_bf16(table: F32) -> F32:
    return widen(narrow(table))


def _in_fp16(table: F32) -> F32:
    return table.astype(np.float16).astype(np.float32)
