"""Faults written from threads, with their right answers, after the causes had been changed for other lists.

They were counted only until 30 November, when the causes were changed with them in sight; docs/results says how they
fared before and after.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from auditor.compare import Logprobs
from auditor.faults.ops import broken
from auditor.faults.reported import absentees, of_version, right, to_e4m3, with_weights
from auditor.faults.suite import Fault, filtered, kv_of, logits_of, on_ops, one_of, read_off, rotated
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import F32, I32, Bits, Reference


@dataclass(frozen=True, slots=True)
class _OneAhead(Reference):
    """Every query sees the key after its own as well."""

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's on queries one earlier; the last one has nothing ahead of it."""
        shifted = np.concatenate([q[:1], q[:-1]])
        out, m, l = Reference.attention(self, shifted, k, v, cu_q, cu_k)
        last, m_last, l_last = Reference.attention(self, q, k, v, cu_q, cu_k)
        return (
            np.concatenate([out[1:], last[-1:]]),
            np.concatenate([m[1:], m_last[-1:]]),
            np.concatenate([l[1:], l_last[-1:]]),
        )


@dataclass(frozen=True, slots=True)
class _ForeignPrefix(Reference):
    """The first 16 tokens' keys and values are those of another prompt."""

    foreign: tuple[tuple[Bits, Bits], ...] = ()

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's; its layer is known by the values that it is given."""
        k, v = k.copy(), v.copy()
        for own_k, other in zip(self.foreign[::2], self.foreign[1::2], strict=True):
            if np.array_equal(own_k[0], k):
                k[:16], v[:16] = other[0][:16], other[1][:16]
                break
        else:
            k[:16], v[:16] = self.foreign[-1][0][:16], self.foreign[-1][1][:16]
        return Reference.attention(self, q, k, v, cu_q, cu_k)


class _Int8Kv(Reference):
    """Keys and values in 8-bit integers, with a scale for each token and head."""

    __slots__ = ()

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's."""
        return Reference.attention(self, q, _int8(k), _int8(v), cu_q, cu_k)


class _Fp8Products(Reference):
    """Every product in the layers on activations and weights in FP8."""

    __slots__ = ()

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As the reference's, on rounded operands."""
        return Reference.gemm(self, _fp8(x), _fp8(w), segments=segments)


def _int8(bits: Bits) -> Bits:
    wide = from_bf16(bits)
    scale = np.maximum(np.abs(wide).max(axis=-1, keepdims=True), 1e-12) / np.float32(127)
    return to_bf16((np.rint(wide / scale) * scale).astype(np.float32))


def _fp8(bits: Bits) -> Bits:
    wide = from_bf16(bits)
    scale = np.maximum(np.abs(wide).max(axis=-1, keepdims=True), 1e-12) / np.float32(448)
    return to_bf16((to_e4m3(wide / scale) * scale).astype(np.float32))


class _Dropout(Reference):
    """A tenth of what each block adds is dropped, as in a model that was left in training mode."""

    __slots__ = ()

    def residual_add(self, a: Bits, b: Bits) -> Bits:
        """As the reference's, on what is left of the first."""
        kept = np.random.default_rng(int(a[0, 0])).random(a.shape) >= 0.1
        return Reference.residual_add(self, to_bf16((from_bf16(a) * kept / np.float32(0.9)).astype(np.float32)), b)


class _OtherNorm(Reference):
    """About half of the norms of the hidden state have another epsilon."""

    __slots__ = ()

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """As the reference's; which norm it is shows in its weights' first value."""
        return Reference.rms_norm(self, x, w, 1e-4 if x.ndim == 2 and w[0] % 2 else eps)


def _two_temperatures(world: World, s: Drawn) -> Logprobs:
    decoder = world.decoder(s.version)
    half = (len(s.tokens) - s.prompt) // 2
    return np.concatenate([
        world.logprobs(decoder, s, 0.5)[:half], world.logprobs(decoder, s, 1.5)[half:]
    ])  # fmt: skip


def _foreign_prefix(world: World, s: Drawn) -> Logprobs:
    """A prefix cache takes two prompts for one."""
    decoder = world.decoder(s.version)
    other = s.tokens.copy()
    other[:16] = world.random.integers(0, decoder.config.vocab, 16)
    pairs = []
    for own, foreign in zip(kv_of(world, decoder, s.tokens), kv_of(world, decoder, other), strict=True):
        pairs += [own, foreign]
    ops = broken(_ForeignPrefix, decoder.reference, foreign=tuple(pairs))
    return world.logprobs(replace(decoder, reference=ops), s)


def _ten_masked(world: World, s: Drawn) -> Logprobs:
    logits = logits_of(world, s)
    logits[:, absentees(logits, s, world.decoder(1).config.vocab)[5:15]] = -np.inf
    return read_off(world, s, logits)


def _garbage_rows(world: World, s: Drawn) -> Logprobs:
    """53 rows of padding that nobody set to zero count in the softmax."""
    logits = logits_of(world, s).astype(np.float64) / s.temperature
    more = logits[:, world.random.integers(0, 300, 53)] + world.random.standard_normal((len(logits), 53))
    padded = np.concatenate([logits, more], axis=1)
    top = padded.max(axis=1)
    lse = top + np.log(np.exp(padded - top[:, None]).sum(axis=1))
    values: Logprobs = (logits[np.arange(len(logits)), s.tokens[s.prompt :]] - lse).astype(np.float32)
    return values


def _last_rows_before(world: World, s: Drawn) -> Logprobs:
    """Near the limit of the length, the last eight values come from the row before their own."""
    values, before = right(world, s).copy(), read_off(world, s, logits_of(world, s, -1))
    values[-8:] = before[-8:]
    return values


def _averaged(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    return to_bf16((from_bf16(value) + from_bf16(world.decoder(s.version - 1).weights[name])) / np.float32(2))


def _layer_too_far(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """The first layer gets what the second one should."""
    return world.decoder(s.version).weights[name.replace("layers.0.", "layers.1.")]


FOURTH: Final[tuple[Fault, ...]] = (
    Fault(
        "one added to the norms' weights once more", one_of("other_weights", "model_config"),
        with_weights(lambda w, s, n, v: to_bf16(from_bf16(v) + np.float32(1)) if "norm" in n else v),
    ),
    Fault("another epsilon in some norms", one_of("model_config"),
          on_ops(lambda w, s, d: broken(_OtherNorm, d.reference))),
    Fault("two temperatures in one response", one_of("temperature"), _two_temperatures),
    Fault("one key ahead is seen", one_of("attention_mask", "off_by_one"),
          on_ops(lambda w, s, d: broken(_OneAhead, d.reference))),
    Fault("five positions skipped in the response", one_of("position_offset"),
          rotated(lambda w, s, p, f: (np.where(p >= s.prompt + 30, p + 5, p), f))),
    Fault("two prompts taken for one by the cache", one_of("stale_kv", "kv_boundary", "other_context"),
          _foreign_prefix),
    Fault("keys and values in 8-bit integers", one_of("kv_precision"),
          on_ops(lambda w, s, d: broken(_Int8Kv, d.reference))),
    Fault("products in FP8", one_of("weight_precision", "activation_precision"),
          on_ops(lambda w, s, d: broken(_Fp8Products, d.reference))),
    Fault("ten tokens masked", one_of("logit_processor", "truncated_sampling"), _ten_masked),
    Fault("padding with garbage counted", one_of("vocabulary"), _garbage_rows),
    Fault("feed-forward parts never delivered", one_of("stale_weights", "weights_never_delivered"),
          of_version(lambda s: 1, ".mlp.")),
    Fault("a layer's weights one layer too far", one_of("other_weights", "model_config"),
          with_weights(_layer_too_far)),
    Fault("tokens below 0.002 never drawn", one_of("truncated_sampling"), filtered(lambda p: p >= 0.002)),
    Fault("dropout left on", one_of("dropout"), on_ops(lambda w, s, d: broken(_Dropout, d.reference))),
    Fault("the last eight values from the row before", one_of("off_by_one"), _last_rows_before),
    Fault("the mean in every token's place", one_of("value_transform"),
          lambda w, s: np.full_like(right(w, s), right(w, s).mean())),
    Fault("averaged with the version before", one_of("stale_weights", "other_weights", "adapter_scale"),
          with_weights(_averaged)),
)  # fmt: skip
