"""The judge's second list, kept back until the causes had been worked on with the first in sight.

Written together with `blind`, before anything was run; docs/results has the digest of this file.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from auditor.compare import Logprobs
from auditor.faults.blind import at_strength, nucleus, put
from auditor.faults.blind_model import edges_of, foreign_kv, in_order, on_profile, routed_early, segments
from auditor.faults.blind_ops import Window, seen_from
from auditor.faults.declared import DeclaredFault
from auditor.faults.ops import broken
from auditor.faults.reported import of_version, right, to_e4m3, with_weights
from auditor.faults.suite import Fault, Pair, PairFault, filtered, head_of, logits_of, on_ops, one_of, read_off, rotated
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference


@dataclass(frozen=True, slots=True)
class _KeysLate(Reference):
    """From `first` on, every key and value stands one slot too late."""

    first: int = 0

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's on one sequence."""
        k, v = k.copy(), v.copy()
        k[self.first :], v[self.first :] = k[self.first - 1 : -1].copy(), v[self.first - 1 : -1].copy()
        return Reference.attention(self, q, k, v, cu_q, cu_k)


@dataclass(frozen=True, slots=True)
class _ThreeSlices(Reference):
    """Of three context-parallel slices, the last does not see the middle one."""

    edges: tuple[int, int, int] = (0, 0, 0)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's on one sequence."""
        first, second, last = self.edges
        seen = np.r_[0:first, second:last]
        head = seen_from(self, q[:second], k, v, [0] * second)
        mine = [first + i for i in range(last - second)]
        rows = []
        for i, ahead in enumerate(mine):
            kept = seen[: ahead + 1]
            row = second + i
            rows.append(
                Reference.attention(
                    self, q[row : row + 1], k[kept].copy(), v[kept].copy(),
                    np.array([0, 1], np.int32), np.array([0, len(kept)], np.int32),
                )
            )  # fmt: skip
        out, m, l = (np.concatenate([h, *r]) for h, r in zip(head, zip(*rows, strict=True), strict=True))
        return out, m, l


class _PartialRope(Reference):
    """Only the first half of each head is rotated."""

    __slots__ = ()

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """As the reference's, on the frequencies of the first half."""
        turned = Reference.rope(self, x, cos, sin, positions)
        quarter = x.shape[2] // 4
        kept = np.r_[quarter : 2 * quarter, 3 * quarter : x.shape[2]]
        turned[:, :, kept] = x[:, :, kept]
        return turned


class _Gelu(Reference):
    """The gate goes through a GELU."""

    __slots__ = ()

    def swiglu(self, x: Bits) -> Bits:
        """x[T,2I] → bf16 [T,I], by the tangent."""
        half = x.shape[1] // 2
        gate, up = from_bf16(x[:, :half]), from_bf16(x[:, half:])
        bent = 0.5 * gate * (1 + np.tanh(np.float32(0.7978845608) * (gate + np.float32(0.044715) * gate**3)))
        return to_bf16((from_bf16(to_bf16(bent.astype(np.float32))) * up).astype(np.float32))


@dataclass(frozen=True, slots=True)
class _NativeDecode(Reference):
    """Prompt rows by one kernel, and each response row by another, as prefill and decode have."""

    first: int = 0

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As the reference's up to `first`, row by row in the local BLAS from there."""
        out = Reference.gemm(self, x, w, segments=segments)
        wide = from_bf16(w)
        for row in range(self.first, len(x)):
            out[row] = to_bf16(wide @ from_bf16(x[row]))
        return out


def _lora_in_and_out(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """An adapter of the size of all the change so far is added to bf16 weights and taken off again, three times."""
    if value.ndim == 1:
        return value
    change = 3 * (from_bf16(value) - from_bf16(world.decoder(1).weights[name]))
    for _ in range(3):
        value = to_bf16(from_bf16(to_bf16(from_bf16(value) + change)) - change)
    return value


def _second_half_of_the_head(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    if name != "lm_head.weight":
        return value
    return np.concatenate([value[:192], world.decoder(s.version - 2).weights[name][192:]])


def _two_tokens_favoured(world: World, s: Drawn) -> Logprobs:
    logits = logits_of(world, s)
    ids, counts = np.unique(s.tokens[s.prompt :], return_counts=True)
    for token, bias in zip(ids[np.argsort(-counts)[:2]], (1.5, -1.0), strict=True):
        logits[:, token] += np.float32(bias)
    return read_off(world, s, logits)


def _frequency(world: World, s: Drawn) -> Logprobs:
    logits = logits_of(world, s)
    for i, row in enumerate(logits):
        np.subtract.at(row, s.tokens[s.prompt : s.prompt + i], np.float32(0.3))
    return read_off(world, s, logits)


def _many_rows_of_padding(world: World, s: Drawn) -> Logprobs:
    decoder = world.decoder(s.version)
    z = logits_of(world, s)[:, : decoder.config.vocab].astype(np.float64)
    z = np.concatenate([z, np.zeros((len(z), 512 - z.shape[1]))], axis=1) / s.temperature
    top = z.max(axis=1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    values: Logprobs = (z[np.arange(len(z)), s.tokens[s.prompt :]] - lse).astype(np.float32)
    return values


def _two_early_from_half(world: World, s: Drawn) -> Logprobs:
    values = right(world, s)
    half = len(values) // 2
    return np.concatenate([values[:half], np.roll(values[half:], -2)])


def _head_in_fp8(world: World, s: Drawn) -> Logprobs:
    decoder = world.decoder(s.version)
    wide = from_bf16(head_of(decoder))
    scale = np.abs(wide).max(axis=1, keepdims=True) / np.float32(448)
    narrow = to_bf16((to_e4m3(wide / scale) * scale).astype(np.float32))
    return read_off(world, s, decoder.reference.gemm_fp32(decoder.hidden([s.tokens])[s.prompt - 1 : -1], narrow))


def _long_factors(
    world: World, s: Drawn, p: np.ndarray, f: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Each frequency has a factor of its own, from 1 to 6."""
    return p, f / np.linspace(1, 6, len(f))


def _start_added(world: World, pair: Pair) -> Pair:
    rollout, trainer = pair
    tokens = np.concatenate([np.array([1], np.uint32), rollout.tokens])
    kept: dict[str, Any] = {
        "tokens": tokens, "token_count": len(tokens), "tokens_digest": "", "prompt_len": trainer.prompt_len + 1,
    }  # fmt: skip
    return rollout, replace(trainer, **kept)


def _digest_only(world: World, pair: Pair) -> Pair:
    """The trainer sends no tokens, and was given some that differ."""
    rollout, trainer = pair
    tokens = rollout.tokens.copy()
    tokens[30:34] = (tokens[30:34] + 5) % 300
    changed = replace(trainer, tokens=tokens, tokens_digest="")
    return rollout, replace(changed, tokens=None)


def _end_not_counted(world: World, pair: Pair) -> Pair:
    mask = pair[1].mask.copy()
    mask[-1] = False
    return pair[0], replace(pair[1], mask=mask)


def _labels_of_six(world: World, s: Drawn) -> Logprobs:
    targets, edges = s.tokens[s.prompt :].copy(), edges_of(s, 6)
    for first, last in pairwise(edges):
        if s.prompt <= last < len(s.tokens):
            targets[last - s.prompt] = s.tokens[first]
    return read_off(world, s, logits_of(world, s), targets)


SECOND_BLIND: Final[tuple[Fault | DeclaredFault | PairFault, ...]] = (
    Fault("norms and output projections two versions old", one_of("stale_weights"),
          with_weights(lambda w, s, n, v: w.decoder(s.version - 2).weights[n] if "norm" in n or "o_proj" in n else v)),
    Fault("second shard of the output layer old", one_of("stale_weights"), with_weights(_second_half_of_the_head)),
    Fault("first layer never delivered", one_of("weights_never_delivered", "stale_weights"),
          of_version(lambda s: 1, "layers.0.")),
    Fault("adapter of the attention at 1.5 times", one_of("adapter_scale"), at_strength(1.5, "self_attn")),
    Fault("adapter at a quarter of its strength", one_of("adapter_scale"), at_strength(0.25, "")),
    Fault("adapter merged and taken off again in bf16", one_of("weight_precision", "other_weights"),
          with_weights(_lora_in_and_out)),
    Fault("temperature applied three times", one_of("temperature"),
          lambda w, s: w.logprobs(w.decoder(s.version), s, s.temperature**3)),
    Fault("min-p and top-p together", one_of("truncated_sampling"),
          filtered(lambda p: (p >= 0.02 * p.max()) & nucleus(0.97)(p))),
    Fault("values two early from half on", one_of("off_by_one", "value_order"), _two_early_from_half),
    Fault("a tool's values as 0.0", one_of("filler"), put(np.s_[25:37], 0.0)),
    DeclaredFault("start token added", one_of("retokenisation", "off_by_one", "other_context"), _start_added),
    DeclaredFault("other tokens, and no more than a digest", one_of("retokenisation"), _digest_only),
    DeclaredFault("end token counted on one side", one_of("mask", "off_by_one", "truncation"), _end_not_counted),
    Fault("a block of 32 keys of another sequence", one_of("kv_boundary", "stale_kv"), foreign_kv(32, 64)),
    Fault("keys one slot late from a block on", one_of("kv_boundary", "stale_kv"),
          on_ops(lambda w, s, d: broken(_KeysLate, d.reference, first=64))),
    Fault("RoPE with a factor for each frequency", one_of("rope_scaling"), rotated(_long_factors)),
    Fault("half of each head rotated", one_of("rope_scaling", "model_config"),
          on_ops(lambda w, s, d: broken(_PartialRope, d.reference))),
    Fault("the last of three slices misses the middle one", one_of("context_parallel", "attention_mask"),
          on_ops(lambda w, s, d: broken(
              _ThreeSlices, d.reference, edges=(len(s.tokens) // 3, 2 * len(s.tokens) // 3, len(s.tokens))))),
    Fault("three slices in the wrong order", one_of("context_parallel", "value_order"), in_order((0, 2, 1))),
    Fault("labels rolled in six slices", one_of("context_parallel"), _labels_of_six),
    Fault("log-probabilities in fp16", one_of("bf16_head"),
          lambda w, s: right(w, s).astype(np.float16).astype(np.float32)),
    Fault("output layer in FP8", one_of("weight_precision", "bf16_head"), _head_in_fp8),
    Fault("sums in sixteen parts", one_of("reduction_order"), segments(16)),
    Fault("matrix units of an older GPU", one_of("reduction_order"), on_profile("sm80")),
    Fault("another kernel for decoding", one_of("reduction_order", "kv_boundary"),
          on_ops(lambda w, s, d: broken(_NativeDecode, d.reference, first=s.prompt))),
    Fault("a window of 40 in every layer", one_of("attention_mask"),
          on_ops(lambda w, s, d: broken(Window, d.reference, size=40, layers=(0, 1)))),
    Fault("GELU for SiLU", one_of("model_config"), on_ops(lambda w, s, d: broken(_Gelu, d.reference))),
    Fault("181 rows of padding", one_of("vocabulary"), _many_rows_of_padding),
    Fault("two tokens biased", one_of("logit_processor"), _two_tokens_favoured),
    Fault("frequency penalty of 0.3", one_of("logit_processor"), _frequency),
    PairFault("a quarter of the tokens to other experts", one_of("routing"), routed_early(0.25)),
)  # fmt: skip
