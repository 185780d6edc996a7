"""The fifth blind list: an independent draw of what users of RL frameworks report, in the proportion they report it.

Drawn from 181 threads, sorted into families by what was wrong in them; each family has its share of 44. Who drew it had
read no cause and no earlier list. Every docstring says what kind of report a fault stands for.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from auditor.compare import Logprobs
from auditor.faults.blind_fifth_ops import (
    EagerAttention,
    Fp8Kv,
    Fp8Linear,
    RoundedRanks,
    SplitK,
    Windowed,
    flipped_expert,
    mask_inverted,
    mask_shifted,
    merged,
    newline,
    replayed_late,
    tool_counted,
)
from auditor.faults.declared import DeclaredFault
from auditor.faults.ops import WrongKv, broken
from auditor.faults.suite import (
    Break,
    Fault,
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

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_KV_BLOCK = 16


def _right(world: World, s: Drawn) -> Logprobs:
    return world.logprobs(world.decoder(s.version), s).copy()


def _with(world: World, s: Drawn, change: Callable[[dict[str, Bits]], None]) -> Logprobs:
    weights = dict(world.decoder(s.version).weights)
    change(weights)
    return world.logprobs(world.with_weights(weights), s)


def _raw(world: World, s: Drawn) -> Logprobs:
    """The engine reports raw log-probabilities, from before the temperature: its default mode, the commonest report."""
    return world.logprobs(world.decoder(s.version), s, 1.0)


def _divided(world: World, s: Drawn) -> Logprobs:
    """Raw log-probabilities are divided by the temperature afterwards, as if they were logits."""
    return np.asarray(_raw(world, s) / np.float32(s.temperature), np.float32)


def _nucleus(p: np.ndarray, mass: float) -> np.ndarray:
    order = np.argsort(-p)
    kept = np.zeros(len(p), np.bool_)
    kept[order[: int(np.searchsorted(np.cumsum(p[order]), mass)) + 1]] = True
    return kept


def _top_p(p: np.ndarray) -> np.ndarray:
    """Processed log-probabilities of a rollout with top-p, against a trainer that normalises over the vocabulary."""
    return _nucleus(p, 0.92)


def _top_k_top_p(p: np.ndarray) -> np.ndarray:
    """A model's generation_config asks for top-k 20 and top-p 0.95 of what is left; nobody told the trainer."""
    likely = p >= np.sort(p)[-20]
    left = np.where(likely, p, 0.0)
    kept: np.ndarray = likely & _nucleus(left / left.sum(), 0.95)
    return kept


def _labels_shifted(world: World, s: Drawn) -> Logprobs:
    """A trainer whose labels were shifted left once more: each value is the next token's, the last one is padding."""
    return np.append(_right(world, s)[1:], np.float32(0.0))


def _stop_appended(world: World, s: Drawn) -> Logprobs:
    """The stop string is cut off by the engine and put back by the agent loop, its two tokens with 0.0."""
    values = _right(world, s)
    values[-2:] = 0.0
    return values


def _behind(versions: int) -> Break:
    """Asynchronous training, or a sync that was skipped: the engine answers with weights from some steps ago."""
    return lambda world, s: world.logprobs(world.decoder(s.version - versions), s)


def _stale_bucket(world: World, s: Drawn) -> Logprobs:
    """A bucket is copied before its all-gather is done: five tensors in a row are those of the sync before."""
    names = list(world.decoder(s.version).weights)
    first = int(world.random.integers(len(names) - 4))
    old = world.decoder(s.version - 1).weights
    return _with(world, s, lambda weights: weights.update({name: old[name] for name in names[first : first + 5]}))


def _interrupted(world: World, s: Drawn) -> Logprobs:
    """A generation is interrupted for a weight update and resumed with a new prefill: two versions in one response."""
    cut = (len(s.tokens) - s.prompt) // 3
    old = world.logprobs(world.decoder(s.version - 1), s)
    return np.concatenate([old[:cut], _right(world, s)[cut:]])


def _never(world: World, s: Drawn) -> Logprobs:
    """Adapter names do not match, or waking up reloads the checkpoint: the engine always has the base model."""
    return world.logprobs(world.decoder(1), s)


def _head_dropped(world: World, s: Drawn) -> Logprobs:
    """The adapter's part for the output layer is dropped, or a cached copy of it made at the start is never renewed."""
    base = head_of(world.decoder(1))
    return _with(world, s, lambda weights: weights.update({_EMBEDDING if _HEAD not in weights else _HEAD: base}))


def _scaled_adapter(world: World, s: Drawn) -> Logprobs:
    """Rank-stabilised LoRA of rank 16 on an engine that divides by the rank: a quarter of the update arrives."""
    base = world.decoder(1).weights

    def change(weights: dict[str, Bits]) -> None:
        for name, value in weights.items():
            if any(part in name for part in _ADAPTED):
                start = from_bf16(base[name])
                weights[name] = to_bf16(start + np.float32(0.25) * (from_bf16(value) - start))

    return _with(world, s, change)


def _same_shard(world: World, s: Drawn) -> Logprobs:
    """Merged column-parallel matrices are loaded with rank 0's shard on both ranks of two."""

    def change(weights: dict[str, Bits]) -> None:
        for name, value in weights.items():
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                half = len(value) // 2
                weights[name] = np.concatenate([value[:half], value[:half]])

    return _with(world, s, change)


def _flat_qkv(world: World, s: Drawn) -> Logprobs:
    """Megatron keeps queries, keys and values group by group; the conversion reads all queries first, then keys."""
    config = world.decoder(s.version).config
    share, dim = config.heads // config.kv_heads, config.head_dim

    def change(weights: dict[str, Bits]) -> None:
        for layer in range(config.layers):
            q, k, v = (f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv")
            fused = np.concatenate(
                [
                    part
                    for g in range(config.kv_heads)
                    for part in (
                        weights[q][g * share * dim : (g + 1) * share * dim],
                        weights[k][g * dim : (g + 1) * dim],
                        weights[v][g * dim : (g + 1) * dim],
                    )
                ]
            )
            ends = np.cumsum([len(weights[q]), len(weights[k])])
            weights[q], weights[k], weights[v] = np.split(fused, ends)

    return _with(world, s, change)


def _head_overwritten(world: World, s: Drawn) -> Logprobs:
    """A transfer buffer is used again before rank 1 of two has read it: its half of the head is the embedding's."""

    def change(weights: dict[str, Bits]) -> None:
        name = _HEAD if _HEAD in weights else _EMBEDDING
        source = weights[_EMBEDDING] if _HEAD in weights else np.roll(weights[_EMBEDDING], 1, axis=0)
        half = len(source) // 2
        weights[name] = np.concatenate([weights[name][:half], source[half:]])

    return _with(world, s, change)


def _old_prefix(world: World, s: Drawn, decoder: Decoder) -> Any:
    """The prefix cache outlives weight updates: full blocks of a shared prompt were filled three versions ago."""
    old = kv_of(world, world.decoder(s.version - 3), s.tokens)
    return broken(WrongKv, decoder.reference, layers=old, first=0, last=s.prompt // _KV_BLOCK * _KV_BLOCK)


def _kept_in_flight(world: World, s: Drawn) -> Logprobs:
    """Weights change in flight and the cache is kept: two thirds of the response, and their keys, are of the old."""
    cut = (len(s.tokens) - s.prompt) * 2 // 3
    decoder, before = world.decoder(s.version), world.decoder(s.version - 1)
    held = kv_of(world, before, s.tokens)
    ops = broken(WrongKv, decoder.reference, layers=held, first=0, last=s.prompt + cut - 1)
    new = world.logprobs(replace(decoder, reference=ops), s)
    return np.concatenate([world.logprobs(before, s)[:cut], new[cut:]])


def _others_block(world: World, s: Drawn, decoder: Decoder) -> Any:
    """Block tables are mixed up under concurrency: one block of the cache is another request's."""
    first = _KV_BLOCK * int(world.random.integers(1, len(s.tokens) // _KV_BLOCK - 1))
    other = world.random.integers(0, decoder.config.vocab, len(s.tokens))
    return broken(WrongKv, decoder.reference, layers=kv_of(world, decoder, other), first=first, last=first + _KV_BLOCK)


def _zigzag_labels(world: World, s: Drawn) -> Logprobs:
    """Labels are rolled after the zigzag split in two: the last row of a rank's chunk gets its next chunk's token."""
    chunks = np.array_split(np.arange(len(s.tokens)), 4)
    following = np.append(s.tokens[1:], s.tokens[0])
    for first, second in ((0, 3), (1, 2)):
        following[chunks[first][-1]] = s.tokens[chunks[second][0]]
        following[chunks[second][-1]] = s.tokens[chunks[first][0]]
    return read_off(world, s, logits_of(world, s), following[s.prompt - 1 : -1])


def _packed(world: World, s: Drawn) -> Logprobs:
    """Samples packed in one row without their boundaries: the one in front, of 32 tokens, is seen."""
    front = world.random.permutation(s.tokens)[:32]
    joined = replace(s, tokens=np.concatenate([front, s.tokens]), prompt=s.prompt + 32)
    return world.logprobs(world.decoder(s.version), joined)


def _pads_counted(
    world: World, s: Drawn, positions: np.ndarray, frequencies: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts are padded to one length, pads are hidden but their positions counted: responses begin six late."""
    return np.where(positions >= s.prompt, positions + 6, positions), frequencies


def _yarn(world: World, s: Drawn) -> Logprobs:
    """The context is extended by YaRN (factor 4) on one side only; the other one's config does not say so."""
    decoder = world.decoder(s.version)
    config = decoder.config
    dim, base, length = config.head_dim, config.rope_theta, config.max_position
    index = np.arange(0, dim, 2, dtype=np.float64)
    low, high = (
        dim * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32.0, 1.0)
    )  # where a frequency turns that often over the trained length
    low, high = max(np.floor(low), 0.0), min(np.ceil(high), dim - 1.0)
    ramp = np.clip((index / 2 - low) / (high - low), 0.0, 1.0)
    plain = base ** (-index / dim)
    angle = np.arange(len(s.tokens))[:, None] * (plain / 4.0 * ramp + plain * (1.0 - ramp))[None, :]
    scale = 0.1 * np.log(4.0) + 1.0
    table = ((np.cos(angle) * scale).astype(np.float32), (np.sin(angle) * scale).astype(np.float32))
    return world.logprobs(replace(decoder, rope=table), s)


def _split_k(world: World, s: Drawn, decoder: Decoder) -> Any:
    """A small decode batch is given a split-K kernel, a large one is not: values depend on the batch."""
    return broken(SplitK, decoder.reference, parts=4)


def _rounded_ranks(world: World, s: Drawn, decoder: Decoder) -> Any:
    """Tensor parallelism of 4 with an all-reduce in bf16 on one side."""
    return broken(RoundedRanks, decoder.reference, ranks=4)


def _eager(world: World, s: Drawn, decoder: Decoder) -> Any:
    """Eager attention on one side, a flash kernel on the other."""
    return broken(EagerAttention, decoder.reference)


def _bf16_scaled_logits(world: World, s: Drawn) -> Logprobs:
    """Logits leave the model in bf16 and are divided by the temperature in bf16; only the softmax is fp32."""
    logits = from_bf16(to_bf16(logits_of(world, s)))
    scaled = from_bf16(to_bf16(logits / np.float32(s.temperature)))
    return read_off(world, replace(s, temperature=1.0), scaled)


def _bf16_log_softmax(world: World, s: Drawn) -> Logprobs:
    """log_softmax of bf16 logits gives bf16 log-probabilities."""
    return from_bf16(to_bf16(_bf16_scaled_logits(world, s)))


def _fp8_kv(world: World, s: Drawn, decoder: Decoder) -> Any:
    """The rollout's KV cache is fp8 without calibrated scales."""
    return broken(Fp8Kv, decoder.reference)


def _fp8_linear(world: World, s: Drawn, decoder: Decoder) -> Any:
    """An fp8 rollout of a bf16 trainer: weights in blocks, activations as they come."""
    return broken(Fp8Linear, decoder.reference)


def _without_thoughts(world: World, s: Drawn) -> Logprobs:
    """The chat template drops an earlier turn's think block, so that one side's prompt lacks eight tokens in it."""
    tokens = np.concatenate([s.tokens[:7], s.tokens[15:]])
    return world.logprobs(world.decoder(s.version), replace(s, tokens=tokens, prompt=s.prompt - 8))


def _system_prompt(world: World, s: Drawn) -> Logprobs:
    """The template of one side puts a default system prompt of ten tokens in front."""
    decoder = world.decoder(s.version)
    front = np.random.default_rng(5).integers(0, decoder.config.vocab, 10)
    joined = replace(s, tokens=np.concatenate([front, s.tokens]), prompt=s.prompt + 10)
    return world.logprobs(decoder, joined)


def _anothers_values(world: World, s: Drawn) -> Logprobs:
    """Dynamic batching puts samples in another order, and the values are joined with the wrong one."""
    other = world.draw(1, s.prompt, len(s.tokens) - s.prompt)[0]
    return _right(world, replace(other, version=s.version, temperature=s.temperature))


def _nan_run(world: World, s: Drawn) -> Logprobs:
    """Weights are written while a forward pass reads them: four tokens in flight come out as NaN."""
    values = _right(world, s)
    first = int(world.random.integers(len(values) - 4))
    values[first : first + 4] = np.nan
    return values


def _padded_softmax(world: World, s: Drawn) -> Logprobs:
    """The vocabulary is padded to a multiple of 128 with zero rows, and the softmax runs over those, too."""
    logits = logits_of(world, s)
    vocab = world.decoder(s.version).config.vocab
    padding = np.zeros((len(logits), -vocab % 128), np.float32)
    padded = np.ascontiguousarray(np.concatenate([logits[:, :vocab], padding], axis=1))
    heat = np.full(len(logits), s.temperature, np.float32)
    ids = s.tokens[s.prompt :, None]
    reference = world.decoder(s.version).reference
    return reference.logp_from_logits(padded, ids, heat, vocab=padded.shape[1])[0][:, 0]


def _windowed(world: World, s: Drawn, decoder: Decoder) -> Any:
    """One side honours a sliding window in every other layer, the other one attends to everything."""
    return broken(Windowed, decoder.reference, span=40)


def _likeliest(world: World, s: Drawn) -> Logprobs:
    """The first entry of top_logprobs is read instead of the sampled token's."""
    logits = logits_of(world, s)
    vocab = world.decoder(s.version).config.vocab
    return read_off(world, s, logits, logits[:, :vocab].argmax(axis=1))


FIFTH_BLIND: Final[tuple[Fault | PairFault | DeclaredFault, ...]] = (
    Fault("raw log-probabilities", one_of("temperature"), _raw),
    Fault("log-probabilities over the temperature", one_of("temperature", "value_transform"), _divided),
    Fault("processed by top-p 0.92", one_of("truncated_sampling"), filtered(_top_p)),
    Fault("generation_config's top-k and top-p", one_of("truncated_sampling"), filtered(_top_k_top_p)),
    Fault("labels shifted once more", one_of("off_by_one"), _labels_shifted),
    DeclaredFault("mask of the unshifted tokens", one_of("off_by_one"), mask_shifted),
    DeclaredFault("tool output counted", one_of("mask"), tool_counted),
    DeclaredFault("mask inverted", one_of("mask"), mask_inverted),
    Fault("stop string put back with 0.0", one_of("filler"), _stop_appended),
    Fault("engine one sync behind", one_of("stale_weights"), _behind(1)),
    Fault("engine two syncs behind", one_of("stale_weights"), _behind(2)),
    Fault("a bucket of the sync before", one_of("stale_weights"), _stale_bucket),
    Fault("interrupted, resumed on new weights", one_of("stale_weights"), _interrupted),
    Fault("base model for ever", one_of("weights_never_delivered"), _never),
    Fault("head of the start", one_of("weights_never_delivered", "stale_weights"), _head_dropped),
    Fault("adapter at a quarter", one_of("adapter_scale"), _scaled_adapter),
    Fault("rank 0's shard on every rank", one_of("other_weights"), _same_shard),
    Fault("fused QKV read flat", one_of("other_weights"), _flat_qkv),
    Fault("half of the head overwritten", one_of("other_weights"), _head_overwritten),
    Fault("prefix cache three versions old", one_of("stale_kv"), on_ops(_old_prefix)),
    Fault("weights changed in flight, cache kept", one_of("stale_kv", "stale_weights"), _kept_in_flight),
    Fault("another request's block", one_of("kv_boundary"), on_ops(_others_block)),
    Fault("labels rolled in zigzag chunks", one_of("context_parallel"), _zigzag_labels),
    Fault("packed without boundaries", one_of("attention_mask", "other_context"), _packed),
    Fault("pads counted before the response", one_of("position_offset"), rotated(_pads_counted)),
    Fault("YaRN on one side", one_of("rope_scaling"), _yarn),
    Fault("split-K for a small batch", one_of("reduction_order"), on_ops(_split_k)),
    Fault("all-reduce in bf16", one_of("reduction_order"), on_ops(_rounded_ranks)),
    Fault("eager attention", one_of("reduction_order"), on_ops(_eager)),
    Fault("bf16 logits over the temperature", one_of("bf16_head"), _bf16_scaled_logits),
    Fault("log_softmax in bf16", one_of("bf16_head"), _bf16_log_softmax),
    Fault("fp8 cache, scale 1", one_of("kv_precision"), on_ops(_fp8_kv)),
    Fault("fp8 rollout", one_of("weight_precision", "activation_precision"), on_ops(_fp8_linear)),
    PairFault("second expert flipped", one_of("routing"), flipped_expert),
    PairFault("routes replayed a row late", one_of("routing"), replayed_late),
    DeclaredFault("two tokens come back as one", one_of("retokenisation"), merged),
    DeclaredFault("newline after a turn", one_of("retokenisation"), newline),
    Fault("think block dropped from the prompt", one_of("other_context", "truncation"), _without_thoughts),
    Fault("default system prompt in front", one_of("other_context"), _system_prompt),
    Fault("another sample's values", one_of("unrelated_values"), _anothers_values),
    Fault("NaN while weights are written", one_of("nonfinite"), _nan_run),
    Fault("padding rows in the softmax", one_of("vocabulary"), _padded_softmax),
    Fault("sliding window in every other layer", one_of("attention_mask"), on_ops(_windowed)),
    Fault("likeliest token's value", one_of("other_token"), _likeliest),
)
