"""Faults that users of RL frameworks reported, written down with their right answers before any was tried.

Each stands for threads of vLLM, verl, slime, TRL, SkyRL, NeMo-RL, prime-rl and others in which a rollout and a trainer
disagreed; none was in the suite, and no cause was written for it. Right answers may be names that no cause has yet.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from auditor.compare import Logprobs
from auditor.faults.ops import broken
from auditor.faults.reported_ops import (
    BlockBehind,
    HiddenSpan,
    NativeFrom,
    OtherGroups,
    OtherScale,
    PairedRope,
    RoundedParts,
)
from auditor.faults.suite import Break, Fault, logits_of, on_ops, one_of, read_off, rotated
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import Bits


def right(world: World, s: Drawn) -> Logprobs:
    """What a sound side reports."""
    return world.logprobs(world.decoder(s.version), s)


def behind(world: World, s: Drawn, before: np.ndarray, restart: bool) -> Logprobs:
    """The sample's values where other tokens stand in front of it and are seen. restart: positions begin anew."""
    decoder, more = world.decoder(s.version), len(before)
    longer = replace(s, tokens=np.concatenate([before, s.tokens]), prompt=s.prompt + more)
    if restart:
        at = np.concatenate([np.arange(more), np.arange(len(s.tokens))])
        decoder = replace(decoder, rope=(decoder.rope[0][at], decoder.rope[1][at]))
    return world.logprobs(decoder, longer)


def with_weights(change: Callable[[World, Drawn, str, Bits], Bits]) -> Break:
    """change: name and value of a tensor → the one that the side has."""

    def wrong(world: World, s: Drawn) -> Logprobs:
        weights = world.decoder(s.version).weights
        return world.logprobs(world.with_weights({n: change(world, s, n, w) for n, w in weights.items()}), s)

    return wrong


def of_version(pick: Callable[[Drawn], int], part: str) -> Break:
    """Tensors with `part` in their name are those of another version."""
    return with_weights(lambda w, s, n, value: w.decoder(pick(s)).weights[n] if part in n else value)


def _neighbour_seen(world: World, s: Drawn) -> Logprobs:
    return behind(world, s, world.random.integers(0, world.decoder(1).config.vocab, 40), restart=True)


def _without_thoughts(world: World, s: Drawn) -> Logprobs:
    """Eight tokens in the middle of the prompt are gone, as a template drops an earlier turn's thoughts."""
    tokens = np.delete(s.tokens, np.s_[8:16])
    return world.logprobs(world.decoder(s.version), replace(s, tokens=tokens, prompt=s.prompt - 8))


def _sentinels(world: World, s: Drawn) -> Logprobs:
    values = right(world, s).copy()
    values[world.random.choice(len(values), len(values) // 5, replace=False)] = -9999.0
    return values


def _starts_over(world: World, s: Drawn) -> Logprobs:
    """A generation is resumed, and its values are appended from the first one on again."""
    values = right(world, s)
    return np.concatenate([values[: len(values) // 2], values[: len(values) - len(values) // 2]])


def _adapter_twice(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    return to_bf16(2 * from_bf16(value) - from_bf16(world.decoder(1).weights[name]))


def _swapped(first: str, second: str) -> Break:
    def change(world: World, s: Drawn, name: str, value: Bits) -> Bits:
        weights = world.decoder(s.version).weights
        if first in name:
            return weights[name.replace(first, second)]
        return weights[name.replace(second, first)] if second in name else value

    return with_weights(change)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Rounded to the values of FP8 E4M3, to nearest even; fp32."""
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-6)))
    step = np.exp2(exponent - 3)
    rounded: np.ndarray = np.clip(np.rint(x / step) * step, -448, 448).astype(np.float32)
    return rounded


def _fp8(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """Every matrix inside the layers in FP8 with a scale a row."""
    if "_proj." not in name:
        return value
    wide = from_bf16(value)
    scale = np.abs(wide).max(axis=1, keepdims=True) / np.float32(448)
    return to_bf16(to_e4m3(wide / scale) * scale)


def _rope_in_bf16(world: World, s: Drawn) -> Logprobs:
    decoder = world.decoder(s.version)
    cos, sin = (from_bf16(to_bf16(table)) for table in decoder.rope)
    return world.logprobs(replace(decoder, rope=(cos, sin)), s)


def absentees(logits: np.ndarray, s: Drawn, vocab: int) -> np.ndarray:
    """Tokens that are never drawn in the response, the likeliest on the whole first."""
    p = np.exp((logits[:, :vocab] - logits[:, :vocab].max(axis=1, keepdims=True)).astype(np.float64)).mean(axis=0)
    order = np.argsort(-p)
    return order[~np.isin(order, s.tokens[s.prompt :])]


def _end_masked_at_first(world: World, s: Drawn) -> Logprobs:
    """A least length: the end token cannot be drawn among the first 24."""
    logits = logits_of(world, s)
    logits[:24, absentees(logits, s, world.decoder(1).config.vocab)[0]] = -np.inf
    return read_off(world, s, logits)


def _presence(world: World, s: Drawn) -> Logprobs:
    logits = logits_of(world, s)
    for i, row in enumerate(logits):
        row[np.unique(s.tokens[s.prompt : s.prompt + i])] -= np.float32(0.5)
    return read_off(world, s, logits)


def _not_allowed(world: World, s: Drawn) -> Logprobs:
    """A fifth of the vocabulary is forbidden."""
    logits = logits_of(world, s)
    vocab = world.decoder(1).config.vocab
    free = absentees(logits, s, vocab)
    logits[:, world.random.choice(free, vocab // 5, replace=False)] = -np.inf
    return read_off(world, s, logits)


def _parts_of(world: World, s: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """The drawn tokens' heated logits and the log-sum-exp, float64 [R] each."""
    z = logits_of(world, s)[:, : world.decoder(1).config.vocab].astype(np.float64) / s.temperature
    top = z.max(axis=1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    return z[np.arange(len(z)), s.tokens[s.prompt :]], lse


def _lse_in_bf16(world: World, s: Drawn) -> Logprobs:
    chosen, lse = _parts_of(world, s)
    return chosen.astype(np.float32) - from_bf16(to_bf16(lse.astype(np.float32)))


def _three_versions(world: World, s: Drawn) -> Logprobs:
    """The generation is stopped twice for new weights, and its prefix read anew each time."""
    third = (len(s.tokens) - s.prompt) // 3
    old, middle, new = (world.logprobs(world.decoder(s.version - back), s) for back in (2, 1, 0))
    return np.concatenate([old[:third], middle[third : 2 * third], new[2 * third :]])


def _drafted(world: World, s: Drawn) -> Logprobs:
    """Every second token was proposed by a smaller model, and its value is reported."""
    decoder = world.decoder(s.version)
    small = replace(decoder, config=replace(decoder.config, layers=1))
    values = right(world, s).copy()
    values[::2] = world.logprobs(small, s)[::2]
    return values


def _slices_in_rank_order(world: World, s: Drawn) -> Logprobs:
    """Two ranks hold slices 0, 3 and 1, 2 of four, and are put one after the other."""
    edges = [round(i * len(s.tokens) / 4) for i in range(5)]
    spans = [right(world, s)[max(0, a - s.prompt) : max(0, b - s.prompt)] for a, b in pairwise(edges)]
    return np.concatenate([spans[i] for i in (0, 3, 1, 2)])


def _over_one_shard(world: World, s: Drawn) -> Logprobs:
    """The softmax is over the shard of the vocabulary that holds the token."""
    vocab, cut = world.decoder(1).config.vocab, 192
    z = logits_of(world, s)[:, :vocab].astype(np.float64) / s.temperature
    ids = s.tokens[s.prompt :]
    lse = np.array([
        np.log(np.exp(row[:cut] if token < cut else row[cut:]).sum()) for row, token in zip(z, ids, strict=True)
    ])  # fmt: skip
    values: Logprobs = (z[np.arange(len(z)), ids] - lse).astype(np.float32)
    return values


def _foreign_targets(world: World, s: Drawn) -> Logprobs:
    """A rank takes 0 for the logit of a token that another rank holds, and nobody adds them up."""
    chosen, lse = _parts_of(world, s)
    values: Logprobs = (np.where(s.tokens[s.prompt :] < 192, chosen, 0.0) - lse).astype(np.float32)
    return values


def _end_by_another_name(world: World, s: Drawn) -> Logprobs:
    """The last token's value is that of the other end token."""
    ids = s.tokens[s.prompt :].copy()
    ids[-1] = (ids[-1] + 1) % world.decoder(1).config.vocab
    return read_off(world, s, logits_of(world, s), ids)


THIRD: Final[tuple[Fault, ...]] = (
    Fault("packed behind a neighbour that is seen", one_of("attention_mask", "other_context"), _neighbour_seen),
    Fault("left padding counted in positions", one_of("position_offset"), rotated(lambda w, s, p, f: (p + 37.0, f))),
    Fault(
        "pads on the left attended", one_of("attention_mask", "other_context"),
        lambda w, s: behind(w, s, np.zeros(16, np.int64), restart=False),
    ),
    Fault(
        "start token twice", one_of("other_context", "retokenisation"),
        lambda w, s: behind(w, s, s.tokens[:1], restart=False),
    ),
    Fault(
        "tool output hidden from attention", one_of("attention_mask"),
        on_ops(lambda w, s, d: broken(HiddenSpan, d.reference, first=8, last=16)),
    ),
    Fault("thoughts stripped from the prompt", one_of("other_context", "truncation", "retokenisation"),
          _without_thoughts),
    Fault("missing values as -9999", one_of("filler", "nonfinite"), _sentinels),
    Fault("a resumed generation's values start over", one_of("off_by_one", "value_order"), _starts_over),
    Fault("adapter added twice", one_of("other_weights", "adapter_scale"), with_weights(_adapter_twice)),
    Fault("down projections never delivered", one_of("stale_weights", "weights_never_delivered"),
          of_version(lambda s: 1, "down_proj")),
    Fault("norms left out of the update", one_of("stale_weights", "weights_never_delivered"),
          of_version(lambda s: s.version - 1, "norm")),
    Fault("gate and up in each other's place", one_of("other_weights"), _swapped("gate_proj", "up_proj")),
    Fault(
        "norms of queries and keys not loaded", one_of("model_config", "other_weights"),
        with_weights(lambda w, s, n, v: np.full_like(v, 0x3F80) if "q_norm" in n or "k_norm" in n else v),
    ),
    Fault("output layer never delivered", one_of("stale_weights", "weights_never_delivered"),
          of_version(lambda s: 1, "lm_head")),
    Fault("weights in FP8", one_of("weight_precision", "other_weights"), with_weights(_fp8)),
    Fault("rotary table in bf16", one_of("rope_precision", "rope_scaling"), _rope_in_bf16),
    Fault("neighbours rotated together", one_of("rope_scaling", "model_config"),
          on_ops(lambda w, s, d: broken(PairedRope, d.reference))),
    Fault("positions from 0 again in the response", one_of("position_offset"),
          rotated(lambda w, s, p, f: (np.where(p >= s.prompt, p - s.prompt, p), f))),
    Fault("scores divided by the root of hidden / heads", one_of("model_config"),
          on_ops(lambda w, s, d: broken(OtherScale, d.reference, dim=d.config.hidden // d.config.heads))),
    Fault("query heads grouped in another way", one_of("model_config", "other_weights"),
          on_ops(lambda w, s, d: broken(OtherGroups, d.reference))),
    Fault("end token masked at first", one_of("logit_processor"), _end_masked_at_first),
    Fault("presence penalty", one_of("logit_processor"), _presence),
    Fault("a fifth of the vocabulary forbidden", one_of("logit_processor", "truncated_sampling"), _not_allowed),
    Fault("log-sum-exp in bf16", one_of("bf16_head"), _lse_in_bf16),
    Fault("logarithm of p + 1e-5", one_of("value_transform"),
          lambda w, s: np.log(np.exp(right(w, s)) + np.float32(1e-5))),
    Fault("parts rounded before the all-reduce", one_of("reduction_order"),
          on_ops(lambda w, s, d: broken(RoundedParts, d.reference))),
    Fault("another kernel from a chunk on", one_of("kv_boundary", "reduction_order"),
          on_ops(lambda w, s, d: broken(NativeFrom, d.reference, first=64))),
    Fault("a block holds the one before it", one_of("kv_boundary", "stale_kv"),
          on_ops(lambda w, s, d: broken(BlockBehind, d.reference, first=64))),
    Fault("three versions in one response", one_of("stale_weights", "stale_kv"), _three_versions),
    Fault("a draft model's values", one_of("other_weights", "model_config"), _drafted),
    Fault("slices in rank order", one_of("context_parallel"), _slices_in_rank_order),
    Fault("softmax over one shard", one_of("vocabulary"), _over_one_shard),
    Fault("0 for another rank's targets", one_of("vocabulary", "filler"), _foreign_targets),
    Fault("the end under another name", one_of("other_token", "retokenisation"), _end_by_another_name),
)  # fmt: skip
