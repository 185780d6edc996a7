"""Faults that no cause was written for: each was thought of, with its right answers, before anybody looked.

FIRST was looked at once, and what was missing in the causes in general was added then. SECOND was written down at the
same time and is only ever counted: nothing is tuned to it.
"""

from dataclasses import replace
from typing import Any, Final

import numpy as np

from auditor.compare import Logprobs
from auditor.faults.ops import broken
from auditor.faults.suite import Break, Fault, filtered, logits_of, on_ops, one_of, other_base, read_off
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import F32, I32, Bits, Reference


def _right(world: World, s: Drawn) -> Logprobs:
    return world.logprobs(world.decoder(s.version), s)


def _of_another_sample(world: World, s: Drawn) -> Logprobs:
    (other,) = world.draw(1, s.prompt, len(s.tokens) - s.prompt)
    return world.logprobs(world.decoder(s.version), replace(other, temperature=s.temperature))


def _fp16_logits(world: World, s: Drawn) -> Logprobs:
    return read_off(world, s, logits_of(world, s).astype(np.float16).astype(np.float32))


def _likely_absentee(logits: np.ndarray, s: Drawn, vocab: int) -> int:
    """The token that is likeliest on the whole and is never drawn, as an end token is before the end."""
    p = np.exp((logits[:, :vocab] - logits[:, :vocab].max(axis=1, keepdims=True)).astype(np.float64)).mean(axis=0)
    p[s.tokens[s.prompt :]] = 0.0
    return int(p.argmax())


def _end_masked(world: World, s: Drawn) -> Logprobs:
    logits = logits_of(world, s)
    logits[:, _likely_absentee(logits, s, world.decoder(1).config.vocab)] = -np.inf
    return read_off(world, s, logits)


def _biased(world: World, s: Drawn) -> Logprobs:
    logits = logits_of(world, s)
    logits[:, _likely_absentee(logits, s, world.decoder(1).config.vocab)] += np.float32(2.0)
    return read_off(world, s, logits)


def _top_k_and_top_p(p: np.ndarray) -> np.ndarray:
    order = np.argsort(-p)
    of_top_k = order[:30]
    kept = of_top_k[: int(np.searchsorted(np.cumsum(p[of_top_k]) / p[of_top_k].sum(), 0.9)) + 1]
    mask = np.zeros(len(p), np.bool_)
    mask[kept] = True
    return mask


def _half_updated(world: World, s: Drawn) -> Logprobs:
    """The first layer of the new version, everything after it of the one before."""
    weights = dict(world.decoder(s.version - 1).weights)
    new = world.decoder(s.version).weights
    weights |= {name: new[name] for name in weights if name.startswith("model.layers.0.")}
    return world.logprobs(world.with_weights(weights), s)


def _old_embedding(world: World, s: Drawn) -> Logprobs:
    weights = dict(world.decoder(s.version).weights)
    name = "model.embed_tokens.weight"
    weights[name] = world.decoder(s.version - 1).weights[name]
    return world.logprobs(world.with_weights(weights), s)


def _value_dropped(world: World, s: Drawn) -> Logprobs:
    """One value goes missing in the middle, what follows moves up, and the last one is said twice."""
    right = _right(world, s)
    at = len(right) // 2 + int(world.random.integers(-5, 6))
    return np.concatenate([right[:at], right[at + 1 :], right[-1:]])


def _late_from_the_middle(world: World, s: Drawn) -> Logprobs:
    right = _right(world, s)
    at = len(right) // 3
    return np.concatenate([right[:at], right[at - 1 : -1]])


def _softcapped(world: World, s: Drawn) -> Logprobs:
    cap = np.float32(8.0)
    return read_off(world, s, (cap * np.tanh(logits_of(world, s) / cap)).astype(np.float32))


def _padding_counted(world: World, s: Drawn) -> Logprobs:
    """53 rows of padding, whose logits are 0, count in the softmax."""
    logits = logits_of(world, s).astype(np.float64) / s.temperature
    padded = np.concatenate([logits, np.zeros((len(logits), 53))], axis=1)
    top = padded.max(axis=1)
    lse = top + np.log(np.exp(padded - top[:, None]).sum(axis=1))
    chosen = logits[np.arange(len(logits)), s.tokens[s.prompt :]]
    values: Logprobs = (chosen - lse).astype(np.float32)
    return values


def _penalised(world: World, s: Drawn) -> Logprobs:
    """Logits of tokens that have occurred are divided by 1.2, or multiplied where they are negative."""
    logits = logits_of(world, s)
    for i, row in enumerate(logits):
        seen = np.unique(s.tokens[: s.prompt + i])
        row[seen] = np.where(row[seen] > 0, row[seen] / np.float32(1.2), row[seen] * np.float32(1.2))
    return read_off(world, s, logits)


def _context_cut(world: World, s: Drawn) -> Logprobs:
    """The first eight tokens of the prompt are not there."""
    return world.logprobs(world.decoder(s.version), replace(s, tokens=s.tokens[8:], prompt=s.prompt - 8))


def _other_prompt(world: World, s: Drawn) -> Logprobs:
    tokens = s.tokens.copy()
    tokens[: s.prompt] = world.random.integers(0, world.decoder(1).config.vocab, s.prompt)
    return world.logprobs(world.decoder(s.version), replace(s, tokens=tokens))


def _likeliest(world: World, s: Drawn) -> Logprobs:
    logits = logits_of(world, s)
    return read_off(world, s, logits, logits[:, : world.decoder(1).config.vocab].argmax(axis=1))


def _config(**change: Any) -> Break:
    def wrong(world: World, s: Drawn) -> Logprobs:
        decoder = world.decoder(s.version)
        return world.logprobs(replace(decoder, config=replace(decoder.config, **change)), s)

    return wrong


def _layers_swapped(world: World, s: Drawn) -> Logprobs:
    weights = dict(world.decoder(s.version).weights)
    for name in list(weights):
        if name.startswith("model.layers.0."):
            other = name.replace("layers.0.", "layers.1.")
            weights[name], weights[other] = weights[other], weights[name]
    return world.logprobs(world.with_weights(weights), s)


def _half_heated(world: World, s: Drawn) -> Logprobs:
    """The temperature is applied to the second half of the response only."""
    right, unheated = _right(world, s), world.logprobs(world.decoder(s.version), s, 1.0)
    half = len(right) // 2
    return np.concatenate([unheated[:half], right[half:]])


class _Windowed(Reference):
    """Every query sees its last 32 keys only."""

    __slots__ = ()

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, row by row, on one sequence."""
        rows = [
            Reference.attention(
                self, q[i : i + 1], k[max(0, i - 31) : i + 1].copy(), v[max(0, i - 31) : i + 1].copy(),
                np.array([0, 1], np.int32), np.array([0, min(i + 1, 32)], np.int32),
            )
            for i in range(len(q))
        ]  # fmt: skip
        out, m, l = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        return out, m, l


class _CoarseKv(Reference):
    """Keys and values keep three bits of mantissa, as in an FP8 cache."""

    __slots__ = ()

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's."""
        k, v = (((a.astype(np.uint32) + 8) & 0xFFF0).astype(np.uint16) for a in (k, v))
        return Reference.attention(self, q, k, v, cu_q, cu_k)


def _clamped(world: World, s: Drawn) -> Logprobs:
    right = _right(world, s)
    return np.maximum(right, np.float32(np.quantile(right, 0.25)))


def _seen_in_bf16(world: World, s: Drawn) -> Logprobs:
    """Temperature is applied to logits in bf16, everything else is right."""
    heated = from_bf16(to_bf16(from_bf16(to_bf16(logits_of(world, s))) / np.float32(s.temperature)))
    logits = heated.astype(np.float32) * np.float32(s.temperature)
    return read_off(world, s, logits)


FIRST: Final[tuple[Fault, ...]] = (
    Fault("values of another sample", one_of("unrelated_values"), _of_another_sample),
    Fault("logits in fp16", one_of("bf16_head"), _fp16_logits),
    Fault("end token masked", one_of("logit_processor", "truncated_sampling"), _end_masked),
    Fault("RoPE base 250,000", one_of("rope_scaling"), other_base(250_000.0)),
    Fault("top-k and top-p together", one_of("truncated_sampling"), filtered(_top_k_and_top_p)),
    Fault("weights half updated", one_of("stale_weights"), _half_updated),
    Fault("a value dropped in the middle", one_of("off_by_one"), _value_dropped),
    Fault("late by one from the middle on", one_of("off_by_one"), _late_from_the_middle),
    Fault("logits softcapped", one_of("logit_processor"), _softcapped),
    Fault("padded vocabulary counted", one_of("vocabulary"), _padding_counted),
    Fault("logarithm of base 2", one_of("value_transform"), lambda w, s: _right(w, s) * np.float32(1.4426951)),
    Fault("prompt cut off in front", one_of("truncation"), _context_cut),
    Fault("repetition penalty", one_of("logit_processor"), _penalised),
)

SECOND: Final[tuple[Fault, ...]] = (
    Fault("the likeliest token's value", one_of("off_by_one", "other_token"), _likeliest),
    Fault("sums from the start", one_of("value_transform", "unrelated_values"), lambda w, s: np.cumsum(_right(w, s))),
    Fault("probabilities, no logarithms", one_of("value_transform"), lambda w, s: np.exp(_right(w, s))),
    Fault("epsilon of the norms 1e-3", one_of("other_weights", "model_config"), _config(rms_norm_eps=1e-3)),
    Fault(
        "a window of 32 keys", one_of("attention_mask", "kv_boundary", "truncation"),
        on_ops(lambda w, s, d: broken(_Windowed, d.reference)),
    ),
    Fault("last layer left out", one_of("other_weights", "model_config"), _config(layers=1)),
    Fault("two layers swapped", one_of("other_weights", "model_config"), _layers_swapped),
    Fault("a bias of 2 on one token", one_of("logit_processor"), _biased),
    Fault("values clamped from below", one_of("value_transform", "filler"), _clamped),
    Fault("another prompt", one_of("other_weights", "truncation", "unrelated_values", "retokenisation"), _other_prompt),
    Fault(
        "keys and values in 8 bits", one_of("stale_kv", "reduction_order", "kv_precision"),
        on_ops(lambda w, s, d: broken(_CoarseKv, d.reference)),
    ),
    Fault("temperature on half of the response", one_of("temperature"), _half_heated),
    Fault("embedding of the version before", one_of("stale_weights", "other_weights"), _old_embedding),
    Fault("temperature in bf16", one_of("bf16_head"), _seen_in_bf16),
)  # fmt: skip
