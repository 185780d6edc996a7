"""A sixth blind list: faults of real jobs off the plain case, by a judge who has read no cause and no other list."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from auditor.compare import Logprobs
from auditor.faults.blind_sixth_ops import (
    CachedKv,
    Fp8Products,
    LaterKv,
    LayerRope,
    NormAfterRope,
    OtherScale,
    RoundedAllReduce,
    SeenKeys,
    SplitKv,
    e4m3,
    e5m2,
    kept_by_mass,
)
from auditor.faults.declared import DeclaredFault
from auditor.faults.ops import Kv, OtherExperts, broken
from auditor.faults.suite import Break, Fault, Pair, PairFault, head_of, logits_of, on_ops, one_of, read_off, rotated
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Bits

_PAGE = 16


def _right(world: World, s: Drawn) -> Logprobs:
    return world.logprobs(world.decoder(s.version), s)


def _second_turn_at_one(world: World, s: Drawn) -> Logprobs:
    """An agent loop passes its sampling parameters with the first request only; the next turn has the server's 1.0."""
    return np.concatenate([_right(world, s)[:31], world.logprobs(world.decoder(s.version), s, 1.0)[31:]])


def _bf16_temperature(world: World, s: Drawn) -> Logprobs:
    """The temperatures of a batch are put into a tensor of the model's dtype."""
    heat = from_bf16(to_bf16(np.array([s.temperature], np.float32)))
    return world.logprobs(world.decoder(s.version), s, float(heat[0]))


def _top_p_before_heat(world: World, s: Drawn) -> Logprobs:
    """One engine filters first and divides by the temperature afterwards: the nucleus is of the untempered row."""
    logits = logits_of(world, s)
    kept = kept_by_mass(logits, 0.93)
    kept[np.arange(len(logits)), s.tokens[s.prompt :]] = True
    return read_off(world, s, np.where(kept, logits, np.float32(-np.inf)).astype(np.float32))


def _top_p_excludes(world: World, s: Drawn) -> Logprobs:
    """The trainer renormalises by the validation's top-p: a token outside of it has −inf, the others too much."""
    logits = logits_of(world, s)
    kept = kept_by_mass(logits / np.float32(s.temperature), 0.6)
    return read_off(world, s, np.where(kept, logits, np.float32(-np.inf)).astype(np.float32))


def _late_from_a_turn(world: World, s: Drawn) -> Logprobs:
    """Turns are glued together, and the newline after the first turn's end mark is counted once only."""
    values = _right(world, s)
    return np.concatenate([values[:30], values[29:-1]])


def _tool_zeros(world: World, s: Drawn) -> Logprobs:
    """Tokens of a tool's answer get 0.0, and nobody takes them out of the mask."""
    values = _right(world, s).copy()
    values[18:30] = 0.0
    return values


def _not_among_top(world: World, s: Drawn) -> Logprobs:
    """Only the three likeliest tokens' values come back; for a token that is none of them −99 is put in."""
    logits = logits_of(world, s)
    mine = np.take_along_axis(logits, s.tokens[s.prompt :, None], axis=1)
    return np.where((logits > mine).sum(axis=1) >= 3, np.float32(-99), _right(world, s)).astype(np.float32)


def _mixed(choose: Callable[[str, Decoder], bool], other: Callable[[World, Drawn], Decoder]) -> Break:
    """The tensors that `choose` names are another decoder's."""

    def wrong(world: World, s: Drawn) -> Logprobs:
        decoder, source = world.decoder(s.version), other(world, s).weights
        weights = {n: source[n] if choose(n, decoder) else w for n, w in decoder.weights.items()}
        return world.logprobs(world.with_weights(weights), s)

    return wrong


def _last_stage(name: str, decoder: Decoder) -> bool:
    parts = name.split(".")
    return parts[1] == "layers" and int(parts[2]) >= decoder.config.layers // 2


def _changed(choose: Callable[[str], bool], change: Callable[[World, Drawn, str, Bits], Bits]) -> Break:
    """change: of each tensor that `choose` names, what is loaded for it."""

    def wrong(world: World, s: Drawn) -> Logprobs:
        weights = dict(world.decoder(s.version).weights)
        weights |= {name: change(world, s, name, w) for name, w in weights.items() if choose(name)}
        return world.logprobs(world.with_weights(weights), s)

    return wrong


def _scaled_by_root(world: World, s: Drawn, name: str, weight: Bits) -> Bits:
    """One side divides alpha by the root of the rank 16, the other by the rank: the adapter is four times as strong."""
    base = from_bf16(world.decoder(1).weights[name])
    return to_bf16(base + 4 * (from_bf16(weight) - base))


def _block_fp8(world: World, s: Drawn, name: str, weight: Bits) -> Bits:
    """Weight-only FP8 with a scale for each block of 128×128, as rollouts with block-quantised MLPs are synced."""
    value = from_bf16(weight)
    for row in range(0, value.shape[0], 128):
        for column in range(0, value.shape[1], 128):
            block = value[row : row + 128, column : column + 128]
            unit = np.abs(block).max() / np.float32(448)
            block[...] = e4m3(block / unit) * unit
    return to_bf16(value)


def _interleaved_queries(world: World, s: Drawn, name: str, weight: Bits) -> Bits:
    """A converter reads groups of query heads as if the first heads of all groups came first."""
    config = world.decoder(s.version).config
    order = np.arange(config.heads).reshape(config.kv_heads, -1).T.ravel()
    moved: Bits = weight.reshape(config.heads, config.head_dim, -1)[order].reshape(weight.shape)
    return moved


def _prefilled_anew(world: World, s: Drawn) -> Logprobs:
    """A partial rollout is aborted, weights are synced, and the rest is drawn after a new prefill: values of both."""
    return np.concatenate([world.logprobs(world.decoder(s.version - 1), s)[:29], _right(world, s)[29:]])


def _two_updates(world: World, s: Drawn) -> Logprobs:
    """Two syncs in one generation, and the cache is kept each time."""
    cuts = (0, s.prompt + 24, s.prompt + 48, len(s.tokens))
    values = np.empty(0, np.float32)
    cache: tuple[Kv, ...] = ()
    for behind, (until, last) in zip((2, 1, 0), pairwise(cuts), strict=True):
        decoder = world.decoder(s.version - behind)
        ops = broken(CachedKv, decoder.reference, cache=cache, until=until)
        now = world.logprobs(replace(decoder, reference=ops), s)
        values = np.concatenate([values, now[len(values) : last - s.prompt + 1]])
        cache = tuple(ops.kept)
    return values


def _lost_tail(world: World, s: Drawn, decoder: Decoder) -> Any:
    """Prefill and decode are apart: the prompt's last page, not full, is never sent, and the decoder reads zeros."""

    def change(kept: Bits) -> Bits:
        kept[(s.prompt - 1) // _PAGE * _PAGE : s.prompt] = 0
        return kept

    return broken(LaterKv, decoder.reference, first=s.prompt, change=change)


def _wrong_page_back(world: World, s: Drawn, decoder: Decoder) -> Any:
    """The request is preempted and swapped in again; one entry of its page table names the page before."""

    def change(kept: Bits) -> Bits:
        kept[2 * _PAGE : 3 * _PAGE] = kept[_PAGE : 2 * _PAGE]
        return kept

    return broken(LaterKv, decoder.reference, first=s.prompt + 37, change=change)


def _e5m2_cache(world: World, s: Drawn, decoder: Decoder) -> Any:
    """The cache is E5M2 without scales; the prefill reads what it has just computed, decoding reads the cache."""
    return broken(LaterKv, decoder.reference, first=s.prompt, change=lambda kept: to_bf16(e5m2(from_bf16(kept))))


def _yarn(world: World, s: Drawn) -> Logprobs:
    """YaRN ×4 over 1024 positions on one side, with its factor of attention."""
    decoder = world.decoder(s.version)
    dim, base = decoder.config.head_dim, np.float64(decoder.config.rope_theta)
    frequency = base ** (-np.arange(0, dim, 2) / dim)
    low, high = (dim * np.log(1024 / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32, 1))
    low, high = max(np.floor(low), 0), min(np.ceil(high), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    angle = np.arange(len(s.tokens))[:, None] * (frequency / 4 * ramp + frequency * (1 - ramp))[None, :]
    factor = 0.1 * np.log(4) + 1
    table = ((np.cos(angle) * factor).astype(np.float32), (np.sin(angle) * factor).astype(np.float32))
    return world.logprobs(replace(decoder, rope=table), s)


def _global_base(world: World, s: Drawn, decoder: Decoder) -> Any:
    """Layers are local and global by turns; one side gives the global one its base of 10⁶, the other none."""
    dim = decoder.config.head_dim
    angle = np.arange(len(s.tokens))[:, None] * 1e6 ** (-np.arange(0, dim, 2) / dim)[None, :]
    table = (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    return broken(LayerRope, decoder.reference, layer=decoder.config.layers - 1, table=table)


def _counted_by_mask(world: World, s: Drawn, p: np.ndarray, f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions are the running sum of the loss mask, so that they stand still over a tool's answer."""
    counts = np.ones(len(p), np.int64)
    counts[s.prompt + 14 : s.prompt + 25] = 0
    return (np.cumsum(counts) - 1).astype(np.float64), f


def _resumed_without_prompt(world: World, s: Drawn, p: np.ndarray, f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A resumed request counts its positions from the response's length alone."""
    return np.where(p >= s.prompt + 33, p - s.prompt, p), f


def _zigzag_labels(world: World, s: Drawn) -> Logprobs:
    """CP 2 has slices 0 and 3 on one rank, 1 and 2 on the other; labels are rolled on each rank by itself."""
    edges = [round(i * len(s.tokens) / 4) for i in range(5)]
    targets = s.tokens.copy()
    targets[edges[1]], targets[edges[3]] = s.tokens[edges[3]], s.tokens[edges[1]]
    return read_off(world, s, logits_of(world, s), targets[s.prompt :])


def _ring_hop_lost(world: World, s: Drawn, decoder: Decoder) -> Any:
    """A ring over three ranks stops one hop early: the last rank never sees the first one's keys."""
    third = len(s.tokens) // 3
    return broken(SeenKeys, decoder.reference, seen=lambda _, t: np.arange(third if t >= 2 * third else 0, t + 1))


def _window(world: World, s: Drawn, decoder: Decoder) -> Any:
    """A hybrid model's first layer has a window of 40 tokens; the other side's backend ignores it."""
    return broken(SeenKeys, decoder.reference, seen=lambda layer, t: np.arange(0 if layer else max(0, t - 39), t + 1))


def _packed_leak(world: World, s: Drawn) -> Logprobs:
    """Samples are packed, positions start over, but the backend has no bounds: 20 tokens of a neighbour are seen."""
    decoder = world.decoder(s.version)
    neighbour = world.random.integers(0, decoder.config.vocab, 20)
    positions = np.concatenate([np.arange(20), np.arange(len(s.tokens))])
    table = (decoder.rope[0][positions], decoder.rope[1][positions])
    both = replace(s, tokens=np.concatenate([neighbour, s.tokens]), prompt=20 + s.prompt)
    return world.logprobs(replace(decoder, rope=table), both)


def _other_date(world: World, s: Drawn) -> Logprobs:
    """The chat template writes today's date into the system prompt; the trainer renders it a day later."""
    tokens = s.tokens.copy()
    tokens[5:8] = (tokens[5:8] + np.array([3, 17, 1])) % world.decoder(s.version).config.vocab
    return world.logprobs(world.decoder(s.version), replace(s, tokens=tokens))


def _thinking_left_out(world: World, s: Drawn) -> Logprobs:
    """The template drops the first turn's thoughts, 15 tokens, when the second turn is scored."""
    first, last, turn = s.prompt + 6, s.prompt + 21, s.prompt + 32
    shorter = replace(s, tokens=np.concatenate([s.tokens[:first], s.tokens[last:]]))
    later = world.logprobs(world.decoder(s.version), shorter)
    return np.concatenate([_right(world, s)[: turn - s.prompt], later[turn - s.prompt - 15 :]])


def _lse_bf16(world: World, s: Drawn) -> Logprobs:
    """Logits are fp32, but the reduced log-sum-exp travels between ranks as bf16."""
    decoder, logits, ids = world.decoder(s.version), logits_of(world, s), s.tokens[s.prompt :, None]
    heat = np.full(len(logits), s.temperature, np.float32)
    _, lse = decoder.reference.logp_from_logits(logits, ids, heat, vocab=decoder.config.vocab)
    mine = np.take_along_axis(logits, ids, axis=1)[:, 0]
    return (mine / heat - from_bf16(to_bf16(lse))).astype(np.float32)


def _response_repetition(world: World, s: Drawn) -> Logprobs:
    """Generation defaults of the model's folder bring a repetition penalty of 1.1, over the drawn tokens alone."""
    logits = logits_of(world, s)
    for i, row in enumerate(logits):
        seen = np.unique(s.tokens[s.prompt : s.prompt + i])
        row[seen] = np.where(row[seen] > 0, row[seen] / np.float32(1.1), row[seen] * np.float32(1.1))
    return read_off(world, s, logits)


def _added_tokens(world: World, s: Drawn) -> Logprobs:
    """One side's output layer was resized for 13 special tokens, which start as the mean of all rows."""
    decoder, logits = world.decoder(s.version), logits_of(world, s)
    vocab = decoder.config.vocab
    added = np.repeat(logits[:, :vocab].mean(axis=1, keepdims=True), 13, axis=1)
    wide, heat = np.concatenate([logits[:, :vocab], added], axis=1), np.full(len(logits), s.temperature, np.float32)
    values, _ = decoder.reference.logp_from_logits(wide, s.tokens[s.prompt :, None], heat, vocab=vocab + 13)
    return np.ravel(values)


def _smoothed(world: World, s: Drawn) -> Logprobs:
    """Values are read from a cross-entropy that still has pre-training's label smoothing of 0.1."""
    decoder, logits, ids = world.decoder(s.version), logits_of(world, s), s.tokens[s.prompt :, None]
    heat, vocab = np.full(len(logits), s.temperature, np.float32), head_of(decoder).shape[0]
    values, lse = decoder.reference.logp_from_logits(logits, ids, heat, vocab=vocab)
    share = np.float32(0.1 * vocab / (vocab - 1))
    mean = (logits[:, :vocab] / heat[:, None]).mean(axis=1) - lse
    smoothed: Logprobs = ((1 - share) * values[:, 0] + share * mean).astype(np.float32)
    return smoothed


def _likeliest(world: World, s: Drawn) -> Logprobs:
    """Of the values of a position the first is taken, which is the likeliest token's and not the drawn one's."""
    logits = logits_of(world, s)
    return read_off(world, s, logits, logits.argmax(axis=1).astype(np.int64))


def _late_routes(world: World, s: Drawn, pair: Pair, side: str) -> Pair:
    """Recorded routes are replayed one token late from a resumed part on, and each side says what it used."""
    used = np.sort(np.argsort(world.random.random((len(s.tokens), 8)), axis=1)[:, :2], axis=1).astype(np.uint16)
    first = s.prompt + 40
    other = np.concatenate([used[:first], used[first - 1 : -1]])
    rows = np.flatnonzero((used != other).any(axis=1))
    decoder = world.decoder(s.version)
    ops = broken(OtherExperts, decoder.reference, rows=tuple(int(r) for r in rows), layers=decoder.config.layers)
    wrong = world.logprobs(replace(decoder, reference=ops), s)
    rollout, trainer = replace(pair[0], routed_experts=used), replace(pair[1], routed_experts=used)
    if side == "rollout":
        return replace(rollout, logprobs=wrong, routed_experts=other), trainer
    return rollout, replace(trainer, logprobs=wrong, routed_experts=other)


def _split_token(world: World, pair: Pair) -> Pair:
    """The text is encoded again, and one drawn token becomes two of its parts."""
    rollout, trainer = pair
    at = rollout.prompt_len + 20
    parts = (rollout.tokens[at] + np.array([11, 29], np.uint32)) % 300
    tokens = np.concatenate([rollout.tokens[:at], parts, rollout.tokens[at + 1 :]]).astype(np.uint32)
    longer: dict[str, Any] = {"tokens": tokens, "token_count": len(tokens), "tokens_digest": ""}
    longer |= {name: np.insert(getattr(trainer, name), 20, getattr(trainer, name)[20]) for name in ("logprobs", "mask")}
    return rollout, replace(trainer, **longer)


def _left_cut(world: World, pair: Pair) -> Pair:
    """The trainer's prompts are cut from the left to fewer tokens than the engine's."""
    rollout, trainer = pair
    assert trainer.tokens is not None
    shorter: dict[str, Any] = {"tokens": trainer.tokens[6:], "token_count": trainer.token_count - 6}
    return rollout, replace(trainer, **shorter, tokens_digest="", prompt_len=trainer.prompt_len - 6)


def _plain(kind: Any, **settings: Any) -> Break:
    """The side runs on the broken `kind`."""
    return on_ops(lambda world, s, decoder: broken(kind, decoder.reference, **settings))


SIXTH_BLIND: Final[tuple[Fault | PairFault | DeclaredFault, ...]] = (
    Fault("second turn at the server's temperature", one_of("temperature"), _second_turn_at_one),
    Fault("temperature rounded to bf16", one_of("temperature"), _bf16_temperature),
    Fault("nucleus chosen before the temperature", one_of("truncated_sampling"), _top_p_before_heat),
    Fault("one token late from the second turn on", one_of("off_by_one"), _late_from_a_turn),
    Fault("tool answer has 0.0", one_of("filler"), _tool_zeros),
    Fault("a floor for tokens not among the top three", one_of("filler"), _not_among_top),
    # A pipeline's last stage misses two syncs in a row.
    Fault("last stage two versions old", one_of("stale_weights"), _mixed(
        _last_stage, lambda world, s: world.decoder(s.version - 2))),
    Fault("weights synced midway, prefilled anew", one_of("stale_weights"), _prefilled_anew),
    # The engine takes adapters for attention only and drops those of the MLP without a word.
    Fault("adapters of the MLP never delivered", one_of("weights_never_delivered", "stale_weights"), _mixed(
        lambda name, _: ".mlp." in name, lambda world, s: world.decoder(1))),
    Fault("adapter scaled by the rank's root", one_of("adapter_scale"), _changed(
        lambda name: ".self_attn." in name and "_proj." in name, _scaled_by_root)),
    Fault("MLP weights in FP8 blocks", one_of("weight_precision"), _changed(lambda name: ".mlp." in name, _block_fp8)),
    Fault("query heads interleaved", one_of("other_weights"), _changed(
        lambda name: "q_proj" in name, _interleaved_queries)),
    Fault("two syncs on one cache", one_of("stale_kv", "stale_weights"), _two_updates),
    Fault("prompt's last page not sent", one_of("kv_boundary"), on_ops(_lost_tail)),
    Fault("wrong page after swapping in", one_of("kv_boundary"), on_ops(_wrong_page_back)),
    Fault("YaRN on one side", one_of("rope_scaling"), _yarn),
    Fault("last layer has a base of its own", one_of("rope_scaling"), on_ops(_global_base)),
    Fault("positions stand still over a tool's answer", one_of("position_offset"), rotated(_counted_by_mask)),
    Fault("positions resume without the prompt", one_of("position_offset"), rotated(_resumed_without_prompt)),
    Fault("labels rolled in zigzag slices", one_of("context_parallel"), _zigzag_labels),
    Fault("last hop of the ring lost", one_of("context_parallel", "attention_mask"), on_ops(_ring_hop_lost)),
    # Flash decoding whose parts' outputs are stored in the cache's dtype.
    Fault("attention in parts of 32 keys", one_of("reduction_order"), _plain(SplitKv)),
    Fault("all-reduce over four ranks in bf16", one_of("reduction_order"), _plain(RoundedAllReduce)),
    Fault("log-sum-exp in bf16", one_of("bf16_head"), _lse_bf16),
    Fault("E5M2 cache read by decoding", one_of("kv_precision"), on_ops(_e5m2_cache)),
    # The trainer's FP8 recipe against a bf16 rollout: both operands of every projection are rounded.
    Fault("projections in FP8", one_of("activation_precision", "weight_precision"), _plain(Fp8Products)),
    # `query_pre_attn_scalar` is read on one side only.
    Fault("scores divided by another root", one_of("model_config"), _plain(OtherScale, times=1.25)),
    # The order of q_norm, k_norm and RoPE differs between two ports of the model.
    Fault("heads normalised after RoPE", one_of("model_config"), _plain(NormAfterRope)),
    Fault("window of 40 in the first layer", one_of("attention_mask"), on_ops(_window)),
    Fault("packed neighbour is seen", one_of("attention_mask", "other_context"), _packed_leak),
    Fault("another date in the system prompt", one_of("other_context"), _other_date),
    Fault("first turn's thoughts left out", one_of("other_context", "truncation"), _thinking_left_out),
    Fault("repetition penalty over the response", one_of("logit_processor"), _response_repetition),
    Fault("13 added tokens normalised over", one_of("vocabulary"), _added_tokens),
    Fault("label smoothing", one_of("value_transform"), _smoothed),
    Fault("drawn token outside of top-p", one_of("nonfinite", "truncated_sampling"), _top_p_excludes),
    Fault("the likeliest token's value", one_of("other_token"), _likeliest),
    PairFault("routes replayed late", one_of("routing"), _late_routes),
    DeclaredFault("one token becomes two", one_of("retokenisation"), _split_token),
    DeclaredFault("prompt cut from the left", one_of("truncation"), _left_cut),
)  # fmt: skip
