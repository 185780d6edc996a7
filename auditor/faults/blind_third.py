"""The judge's third list: forty faults as operators meet them, written before the causes were worked on once more.

None stands in an earlier list. Right answers were fixed before any cause was looked for: one name, or two where both
are true of the fault. docs/results has the digests of this file and of `blind_third_ops`.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from auditor.compare import Logprobs
from auditor.faults.blind import nucleus, put
from auditor.faults.blind_model import edges_of
from auditor.faults.blind_ops import OtherExpertsEarly, SliceAlone
from auditor.faults.blind_third_ops import (
    EagerAttention,
    EmptyBlock,
    Fp8Decode,
    Native,
    NormInFp32,
    PatchedKv,
    PromptBothWays,
    log_sum_exp,
)
from auditor.faults.declared import DeclaredFault
from auditor.faults.ops import broken
from auditor.faults.reported import right, to_e4m3, with_weights
from auditor.faults.suite import (
    Fault,
    Pair,
    PairFault,
    filtered,
    head_of,
    kv_of,
    logits_of,
    on_ops,
    one_of,
    read_off,
    rotated,
)
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Bits


def _last_bucket_lost(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """Weights travel in buckets, in the order of the file; the last one, a third of all tensors, does not arrive."""
    names = list(world.decoder(s.version).weights)
    return world.decoder(s.version - 1).weights[name] if name in names[-(len(names) // 3) :] else value


def _first_rank_old(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """The first of two tensor-parallel ranks missed the last two updates; norms, which both hold, came."""
    if value.ndim == 1:
        return value
    old, mixed = world.decoder(s.version - 2).weights[name], value.copy()
    if "o_proj" in name or "down_proj" in name:
        mixed[:, : value.shape[1] // 2] = old[:, : value.shape[1] // 2]
    else:
        half = 192 if "lm_head" in name or "embed" in name else value.shape[0] // 2
        mixed[:half] = old[:half]
    return mixed


def _norms_of_heads_missing(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """The names of the norms of queries and keys are not in the map of an update, ever."""
    return world.decoder(1).weights[name] if "q_norm" in name or "k_norm" in name else value


def _by_root_of_rank(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """An adapter of rank 16 on queries and values is divided by the root of its rank, and so four times too strong."""
    if "q_proj" not in name and "v_proj" not in name:
        return value
    base = from_bf16(world.decoder(1).weights[name])
    return to_bf16(base + np.float32(4) * (from_bf16(value) - base))


def _adapter_before_left_in(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """The adapter of the step before was not taken off when this step's was merged."""
    if "_proj." not in name:
        return value
    base, before = (from_bf16(world.decoder(v).weights[name]) for v in (1, s.version - 1))
    return to_bf16(from_bf16(value) + (before - base))


def _keys_for_values(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """One layer's fused matrix is taken apart in another order: keys and values change places."""
    weights = world.decoder(s.version).weights
    if name.startswith("model.layers.1.self_attn.k_proj"):
        return weights[name.replace("k_proj", "v_proj")]
    if name.startswith("model.layers.1.self_attn.v_proj"):
        return weights[name.replace("v_proj", "k_proj")]
    return value


def _feed_forward_in_fp8(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """The feed-forward matrices are in FP8 with a scale for each block of 128 by 128; attention is left as it was."""
    if ".mlp." not in name:
        return value
    wide = from_bf16(value)
    for row in range(0, wide.shape[0], 128):
        for column in range(0, wide.shape[1], 128):
            block = wide[row : row + 128, column : column + 128]
            scale = np.abs(block).max() / np.float32(448)
            block[:] = to_e4m3(block / scale) * scale
    return to_bf16(wide)


def _min_p_before_heat(world: World, s: Drawn) -> Logprobs:
    """min-p of 0.02 is chosen at temperature 1, and what is left is heated."""
    logits, vocab = logits_of(world, s), world.decoder(1).config.vocab
    for row, target in zip(logits, s.tokens[s.prompt :], strict=True):
        gone = row[:vocab] < row[:vocab].max() + np.log(0.02)
        gone[target] = False
        row[:vocab][gone] = -np.inf
    return read_off(world, s, logits)


def _models_own_defaults(p: np.ndarray) -> np.ndarray:
    """top-k of 20, then top-p of 0.95 among them."""
    among = np.where(p >= np.sort(p)[-20], p, 0.0)
    kept: np.ndarray = nucleus(0.95)(among / among.sum())
    return kept & (among > 0)


def _generation_config(world: World, s: Drawn) -> Logprobs:
    """The engine takes temperature, top-k and top-p from the model's generation_config.json."""
    return filtered(_models_own_defaults)(world, replace(s, temperature=0.6))


def _mild_repetition(world: World, s: Drawn) -> Logprobs:
    """The model's own default: logits of tokens seen, prompt or response, over 1.05, or times it where below 0."""
    logits = logits_of(world, s)
    for i, row in enumerate(logits):
        seen = np.unique(s.tokens[: s.prompt + i])
        row[seen] = np.where(row[seen] > 0, row[seen] / np.float32(1.05), row[seen] * np.float32(1.05))
    return read_off(world, s, logits)


def _grammar(world: World, s: Drawn) -> Logprobs:
    """At every fourth token a grammar allows forty tokens, each time others."""
    logits, vocab = logits_of(world, s), world.decoder(1).config.vocab
    for row, target in zip(logits[::4], s.tokens[s.prompt :][::4], strict=True):
        gone = np.ones(vocab, np.bool_)
        gone[world.random.choice(vocab, 40, replace=False)] = False
        gone[target] = False
        row[:vocab][gone] = -np.inf
    return read_off(world, s, logits)


def _late_in_each_turn(world: World, s: Drawn) -> Logprobs:
    """Three turns; in each, the first value is said twice and the last one never."""
    turns = np.array_split(right(world, s), 3)
    return np.concatenate([part for turn in turns for part in (turn[:1], turn[:-1])])


def _first_one_lost(world: World, s: Drawn) -> Logprobs:
    """The first value is dropped, and the end padded with 0.0."""
    return np.append(right(world, s)[1:], np.float32(0))


def _mask_of_inputs(world: World, pair: Pair) -> Pair:
    """A tool's tokens are masked; the trainer lays the mask on the inputs, not on the targets."""
    mask = np.ones(len(pair[0].mask), np.bool_)
    mask[26:41] = False
    return replace(pair[0], mask=mask), replace(pair[1], mask=np.append(mask[1:], mask[-1]))


def _thoughts_stripped(world: World, pair: Pair) -> Pair:
    """The trainer's template drops twenty tokens of thinking out of the response."""
    rollout, trainer = pair
    at = rollout.prompt_len + 6
    gone, values_gone = np.s_[at : at + 20], np.s_[6:26]
    tokens = np.delete(rollout.tokens, gone)
    kept: dict[str, Any] = {
        "tokens": tokens, "token_count": len(tokens), "tokens_digest": "",
        "logprobs": np.delete(trainer.logprobs, values_gone), "mask": np.delete(trainer.mask, values_gone),
    }  # fmt: skip
    return rollout, replace(trainer, **kept)


def _top_p_of_one_side(world: World, pair: Pair) -> Pair:
    return replace(pair[0], sampling=replace(pair[0].sampling, top_p=0.95)), pair[1]


def _cached_at_two_ages(world: World, s: Drawn, decoder: Decoder) -> Any:
    """The prompt's first 16 tokens were cached three versions ago, its other 8 behind them one version ago."""
    oldest = kv_of(world, world.decoder(s.version - 3), s.tokens)
    before = world.decoder(s.version - 1)
    behind = broken(PatchedKv, before.reference, patches=((0, 16, oldest),))
    replace(before, reference=behind).hidden([s.tokens])
    return broken(PatchedKv, decoder.reference, patches=((0, s.prompt, tuple(behind.kept)),))


def _long_factors_later(world: World, s: Drawn) -> Logprobs:
    """Up to 64 tokens a model's short factors, all 1, hold; its long factors, 1 to 4, from there on."""
    decoder = world.decoder(s.version)
    dim = decoder.config.head_dim
    f = np.float64(decoder.config.rope_theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    at = np.arange(len(s.tokens), dtype=np.float64)[:, None]
    angle = np.where(at < 64, at * f, at * (f / np.linspace(1, 4, len(f))))
    table = (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    return world.logprobs(replace(decoder, rope=table), s)


def _masked_do_not_count(
    world: World, s: Drawn, p: np.ndarray, f: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Positions are counted over a mask that leaves out a tool's twelve tokens: they all get the one before them."""
    counted = np.ones(len(p))
    counted[s.prompt + 26 : s.prompt + 38] = 0
    return np.cumsum(counted) - 1, f


def _positions_in_rank_order(
    world: World, s: Drawn, p: np.ndarray, f: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Two ranks hold slices 0, 3 and 1, 2 of four, and each counts its positions as if its two were neighbours."""
    spans = [p[a:b] for a, b in pairwise(edges_of(s, 4))]
    positions = p.copy()
    order = np.concatenate([spans[i] for i in (0, 3, 1, 2)]).astype(np.int64)
    positions[order] = p
    return positions, f


def _first_row_at_the_edge(world: World, s: Drawn) -> Logprobs:
    """Rows are rolled inside each of four slices: the token behind a slice is looked up in the slice's first row."""
    decoder = world.decoder(s.version)
    rows = np.arange(s.prompt - 1, len(s.tokens) - 1)
    for first, last in pairwise(edges_of(s, 4)):
        rows[rows == last - 1] = first
    return read_off(world, s, decoder.reference.gemm_fp32(decoder.hidden([s.tokens])[rows], head_of(decoder)))


def _heated(world: World, s: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """Heated logits fp32 [R,V] of the true vocabulary, and those of the drawn tokens [R]."""
    z = (logits_of(world, s)[:, : world.decoder(1).config.vocab] / np.float32(s.temperature)).astype(np.float32)
    return z, z[np.arange(len(z)), s.tokens[s.prompt :]]


def _probabilities_in_bf16(world: World, s: Drawn) -> Logprobs:
    """The softmax is stored in bf16, and its logarithm taken."""
    z, chosen = _heated(world, s)
    values: Logprobs = np.log(from_bf16(to_bf16(np.exp(chosen - log_sum_exp(z)))))
    return values


def _one_log_sum_exp(world: World, s: Drawn) -> Logprobs:
    """Right logits, of which a row's log-sum-exp is taken in one go, and not tile by tile."""
    z, chosen = _heated(world, s)
    values: Logprobs = chosen - log_sum_exp(z)
    return values


def _last_shard_left_out(world: World, s: Drawn) -> Logprobs:
    """The last of four ranks' part of the vocabulary, from 288 on, is not in the softmax."""
    z, chosen = _heated(world, s)
    values: Logprobs = chosen - log_sum_exp(z[:, :288])
    return values


def _replayed_one_late(world: World, s: Drawn, pair: Pair, side: str) -> Pair:
    """The experts that were recorded are replayed one token late in the response."""
    usual = np.tile(np.array([0, 1], np.uint16), (len(s.tokens), 1))
    usual[:, 1] = world.random.choice([1, 2, 3], len(s.tokens), p=[0.7, 0.2, 0.1])
    other = usual.copy()
    other[s.prompt :] = usual[s.prompt - 1 : -1]
    rows = np.flatnonzero((usual != other).any(axis=1))
    decoder = world.decoder(s.version)
    ops = broken(OtherExpertsEarly, decoder.reference, rows=tuple(int(r) for r in rows))
    wrong = world.logprobs(replace(decoder, reference=ops), s)
    rollout, trainer = replace(pair[0], routed_experts=usual), replace(pair[1], routed_experts=usual)
    if side == "rollout":
        return replace(rollout, logprobs=wrong, routed_experts=other), trainer
    return rollout, replace(trainer, logprobs=wrong, routed_experts=other)


def _another_start(world: World, s: Drawn) -> Logprobs:
    """The prompt begins with another start token than the one that was reported."""
    tokens = s.tokens.copy()
    tokens[0] = (tokens[0] + 1) % world.decoder(1).config.vocab
    return world.logprobs(world.decoder(s.version), replace(s, tokens=tokens))


def _other_epsilon(world: World, s: Drawn) -> Logprobs:
    """The norms' epsilon is a default, 1e-5, and not the config's."""
    decoder = world.decoder(s.version)
    return world.logprobs(replace(decoder, config=replace(decoder.config, rms_norm_eps=1e-5)), s)


_WEIGHTS: Final[tuple[Fault, ...]] = (
    Fault("the last bucket of an update lost", one_of("stale_weights"), with_weights(_last_bucket_lost)),
    Fault("first of two ranks two versions old", one_of("stale_weights"), with_weights(_first_rank_old)),
    Fault("norms of queries and keys never delivered", one_of("weights_never_delivered", "stale_weights"),
          with_weights(_norms_of_heads_missing)),
    Fault("adapter over the root of its rank", one_of("adapter_scale"), with_weights(_by_root_of_rank)),
    Fault("the adapter before left in", one_of("adapter_scale", "other_weights"),
          with_weights(_adapter_before_left_in)),
    Fault("keys for values in one layer", one_of("other_weights"), with_weights(_keys_for_values)),
    Fault("feed-forward part in FP8 blocks", one_of("weight_precision"), with_weights(_feed_forward_in_fp8)),
    Fault("raw values of the version before", one_of("stale_weights", "temperature"),
          lambda w, s: w.logprobs(w.decoder(s.version - 1), s, 1.0)),
)  # fmt: skip

_VALUES: Final[tuple[Fault | DeclaredFault, ...]] = (
    Fault("temperature of a schedule's step before", one_of("temperature"),
          lambda w, s: w.logprobs(w.decoder(s.version), s, 0.95 * s.temperature)),
    Fault("top-p of 0.99", one_of("truncated_sampling"), filtered(nucleus(0.99))),
    Fault("min-p before the temperature", one_of("truncated_sampling"), _min_p_before_heat),
    Fault("the model's own generation config", one_of("truncated_sampling", "temperature"), _generation_config),
    Fault("repetition penalty of 1.05", one_of("logit_processor"), _mild_repetition),
    Fault("a grammar at some tokens", one_of("logit_processor"), _grammar),
    Fault("values one late in each turn", one_of("off_by_one"), _late_in_each_turn),
    Fault("first value dropped, 0.0 at the end", one_of("off_by_one", "filler"), _first_one_lost),
    Fault("a tool's values as 1.0", one_of("filler"), put(np.s_[28:43], 1.0)),
    Fault("NaN from a token on", one_of("nonfinite"), put(np.s_[55:], np.nan)),
    Fault("the loss in the place of the logarithm", one_of("value_transform"), lambda w, s: -right(w, s)),
    DeclaredFault("mask of the inputs", one_of("off_by_one", "mask"), _mask_of_inputs),
    DeclaredFault("thoughts stripped from the response", one_of("truncation", "retokenisation"), _thoughts_stripped),
    DeclaredFault("top-p on one side, and said", one_of("truncated_sampling", "random_state"), _top_p_of_one_side),
)  # fmt: skip

_MODEL: Final[tuple[Fault | PairFault, ...]] = (
    Fault("a prompt cached at two ages", one_of("stale_kv"), on_ops(_cached_at_two_ages)),
    Fault("a block never written in the last layer", one_of("kv_boundary"),
          on_ops(lambda w, s, d: broken(EmptyBlock, d.reference, first=48, last=64, layer=d.config.layers - 1))),
    Fault("a chunk of the prompt sees only itself", one_of("kv_boundary", "attention_mask"),
          on_ops(lambda w, s, d: broken(SliceAlone, d.reference, first=8, last=16))),
    Fault("decoding on a cache in FP8 without scales", one_of("kv_precision"),
          on_ops(lambda w, s, d: broken(Fp8Decode, d.reference, prompt=s.prompt))),
    Fault("long RoPE factors from 64 on", one_of("rope_scaling"), _long_factors_later),
    Fault("masked tokens do not count in positions", one_of("position_offset"), rotated(_masked_do_not_count)),
    Fault("positions in the order of ranks", one_of("context_parallel", "position_offset"),
          rotated(_positions_in_rank_order)),
    Fault("the first row at a slice's edge", one_of("context_parallel"), _first_row_at_the_edge),
    Fault("the prompt sees itself both ways", one_of("attention_mask"),
          on_ops(lambda w, s, d: broken(PromptBothWays, d.reference, prompt=s.prompt))),
    Fault("eager attention in bf16", one_of("reduction_order", "activation_precision"),
          on_ops(lambda w, s, d: broken(EagerAttention, d.reference))),
    Fault("norms rounded once", one_of("reduction_order", "activation_precision"),
          on_ops(lambda w, s, d: broken(NormInFp32, d.reference))),
    Fault("probabilities in bf16", one_of("bf16_head"), _probabilities_in_bf16),
    Fault("native ops throughout", one_of("reduction_order"), on_ops(lambda w, s, d: broken(Native, d.reference))),
    Fault("log-sum-exp in one go", one_of("reduction_order"), _one_log_sum_exp),
    Fault("last shard of the vocabulary left out", one_of("vocabulary"), _last_shard_left_out),
    PairFault("experts replayed one token late", one_of("routing"), _replayed_one_late),
    Fault("another start token", one_of("other_context", "retokenisation"), _another_start),
    Fault("epsilon of the norms 1e-5", one_of("model_config"), _other_epsilon),
)  # fmt: skip

THIRD_BLIND: Final[tuple[Fault | DeclaredFault | PairFault, ...]] = (*_WEIGHTS, *_VALUES, *_MODEL)
