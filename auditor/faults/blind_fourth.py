"""The judge's fourth list: what users of RL frameworks meet, as often as their threads have it, in ways not tried yet.

Right answers were fixed before any cause was looked for: one name, or two where the protocol makes both right. What
kind of report a fault stands for is said where it is listed. docs/results has the digests of this file and of
`blind_fourth_ops`.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from auditor.compare import Logprobs
from auditor.faults.blind import at_strength, nucleus, put
from auditor.faults.blind_fourth_ops import (
    ClippedKv,
    EagerRope,
    FlashBlocks,
    GivenAway,
    HiddenTokens,
    Int8Products,
    NativePrompt,
    NormAfterRope,
    TreeInBf16,
    WideResidual,
    int4_groups,
    read_in_groups,
)
from auditor.faults.blind_model import edges_of
from auditor.faults.blind_ops import OtherExpertsEarly
from auditor.faults.blind_third_ops import PatchedKv
from auditor.faults.declared import DeclaredFault
from auditor.faults.ops import WrongKv, broken
from auditor.faults.reported import behind, of_version, right, with_weights
from auditor.faults.suite import Fault, Pair, PairFault, filtered, kv_of, logits_of, on_ops, one_of, read_off, rotated
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from auditor.records import Layout
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Bits


def _retried_elsewhere(world: World, s: Drawn) -> Logprobs:
    """The first half is of an engine that still has the first version; it is lost, and a sound one goes on."""
    first, now = world.logprobs(world.decoder(1), s), right(world, s)
    half = len(now) // 2
    return np.concatenate([first[:half], now[half:]])


def _every_third_bucket(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """Weights travel three tensors at a time; every third bucket is dropped."""
    at = list(world.decoder(s.version).weights).index(name)
    return world.decoder(s.version - 1).weights[name] if at // 3 % 3 == 1 else value


def _first_parts_only(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """Of matrices that the engine holds as one, only the first part is found by its name and updated."""
    lost = ("k_proj", "v_proj", "up_proj")
    return world.decoder(s.version - 1).weights[name] if any(part in name for part in lost) else value


def _heads_in_groups(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """Queries, keys and values are laid one after the other, and read as if each group had its own in a row."""
    prefix, _, part = name.partition("self_attn.")
    if part not in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        return value
    decoder = world.decoder(s.version)
    laid = np.concatenate([decoder.weights[f"{prefix}self_attn.{kind}_proj.weight"] for kind in "qkv"])
    read = read_in_groups(laid, decoder.config.heads, decoder.config.kv_heads)
    return np.ascontiguousarray(read["qkv".index(part[0])])


def _gate_and_up_by_rank(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """Two ranks' parts of gate and up are put one after the other and cut in the middle."""
    if "gate_proj" not in name and "up_proj" not in name:
        return value
    weights = world.decoder(s.version).weights
    both = [weights[name.replace("up_proj", "gate_proj")], weights[name.replace("gate_proj", "up_proj")]]
    half = len(value) // 2
    rank = slice(None, half) if "gate_proj" in name else slice(half, None)
    return np.concatenate([part[rank] for part in both])


def _renamed_layers(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """For layers that the engine calls by other names an adapter's strength is not found, and 1 is taken for 2."""
    if "o_proj" not in name and "down_proj" not in name:
        return value
    base = from_bf16(world.decoder(1).weights[name])
    return to_bf16(base + np.float32(0.5) * (from_bf16(value) - base))


def _plain_middle_turn(world: World, s: Drawn) -> Logprobs:
    """Of three turns, the second is asked for without sampling parameters."""
    values, plain = right(world, s).copy(), world.logprobs(world.decoder(s.version), s, 1.0)
    third = len(values) // 3
    values[third : 2 * third] = plain[third : 2 * third]
    return values


def _filtered_last_turn(world: World, s: Drawn) -> Logprobs:
    """Only the last of three turns is drawn, and its values taken, under a top-p of 0.9."""
    values, kept = right(world, s).copy(), filtered(nucleus(0.9))(world, s)
    at = 2 * len(values) // 3
    values[at:] = kept[at:]
    return values


def _strong_presence(world: World, s: Drawn) -> Logprobs:
    """What the model's card asks for against loops: 1.5 off every token that the response has had."""
    logits = logits_of(world, s)
    for i, row in enumerate(logits):
        row[np.unique(s.tokens[s.prompt : s.prompt + i])] -= np.float32(1.5)
    return read_off(world, s, logits)


def _certain_to_zero(world: World, s: Drawn) -> Logprobs:
    """NaN comes of tokens that are nearly certain, here of the likeliest tenth, and is sent as 0.0."""
    values = right(world, s).copy()
    values[values >= np.quantile(values, 0.9)] = 0.0
    return values


def _beyond_top_k(world: World, s: Drawn) -> Logprobs:
    """Tokens that a draft had accepted and a top-k of 5 would not have kept are said to be impossible."""
    values, logits = right(world, s).copy(), logits_of(world, s)[:, : world.decoder(1).config.vocab]
    chosen = logits[np.arange(len(logits)), s.tokens[s.prompt :]]
    values[(logits > chosen[:, None]).sum(axis=1) >= 5] = -np.inf
    return values


def _neighbours(world: World, s: Drawn) -> Logprobs:
    """Samples of a group come back in another order: same prompt, another response."""
    (other,) = world.draw(1, s.prompt, len(s.tokens) - s.prompt)
    tokens = np.concatenate([s.tokens[: s.prompt], other.tokens[s.prompt :]])
    return world.logprobs(world.decoder(s.version), replace(s, tokens=tokens))


def _slice_by_padding(world: World, s: Drawn) -> Logprobs:
    """The response is cut out from the end, where five pads stand: its slice begins five tokens too early."""
    return world.logprobs(world.decoder(s.version), replace(s, prompt=s.prompt - 5))[:-5]


def _bonus_first(world: World, s: Drawn) -> Logprobs:
    """Of each four tokens of a speculative step, the value of the last one stands first."""
    values = right(world, s).copy()
    whole = len(values) // 4 * 4
    values[:whole] = np.roll(values[:whole].reshape(-1, 4), 1, axis=1).reshape(-1)
    return values


def _three_merges(world: World, pair: Pair) -> Pair:
    """The text of three turns is encoded anew; in each, two tokens become one."""
    rollout, trainer = pair
    tokens, at = rollout.tokens.copy(), rollout.prompt_len
    places = np.array([at + 4, at + 27, at + 51])
    tokens[places] = (tokens[places] + 13) % 300
    tokens = np.delete(tokens, places + 1)
    kept: dict[str, Any] = {"tokens": tokens, "token_count": len(tokens), "tokens_digest": ""}
    return rollout, replace(trainer, **kept, logprobs=trainer.logprobs[:-3], mask=trainer.mask[:-3])


def _stop_string_cut(world: World, pair: Pair) -> Pair:
    """The engine takes the two tokens of its stop string off the response; the trainer has them."""
    rollout, trainer = pair
    shorter: dict[str, Any] = {
        "tokens": rollout.tokens[:-2], "logprobs": rollout.logprobs[:-2], "mask": rollout.mask[:-2],
    }  # fmt: skip
    return replace(rollout, **shorter), trainer


def _mask_by_pad_id(world: World, pair: Pair) -> Pair:
    """The trainer's mask is where ids are not that of pads, which the response has, too."""
    ids = pair[0].tokens[pair[0].prompt_len :]
    return pair[0], replace(pair[1], mask=ids != np.bincount(ids).argmax())


def _two_behind(world: World, pair: Pair) -> Pair:
    """An asynchronous engine says that it is two versions behind, and with what weights."""
    version = pair[0].weight_version - 2
    return replace(pair[0], weight_version=version, weight_digest=world.decoder(version).weight_digest), pair[1]


def _padded_is_true(world: World, pair: Pair) -> Pair:
    """The trainer takes the padded vocabulary for the true one."""
    padded = pair[1].layout.padded_vocab_size
    return pair[0], replace(pair[1], layout=Layout(1, 1, padded, padded, (0, padded)))


def _two_updates_kept_cache(world: World, s: Drawn) -> Logprobs:
    """Weights are exchanged twice in mid-generation, and the cache is kept through both."""
    oldest, before, decoder = (world.decoder(s.version - back) for back in (2, 1, 0))
    first, second = s.prompt + 20, s.prompt + 46
    old = ((0, first, kv_of(world, oldest, s.tokens)),)
    going = broken(PatchedKv, before.reference, patches=old)
    replace(before, reference=going).hidden([s.tokens])
    middle = replace(before, reference=broken(PatchedKv, before.reference, patches=old))
    kept = ((0, second, tuple(going.kept)),)
    last = replace(decoder, reference=broken(PatchedKv, decoder.reference, patches=kept))
    a, b = first - s.prompt + 1, second - s.prompt + 1
    parts = world.logprobs(oldest, s)[:a], world.logprobs(middle, s)[a:b], world.logprobs(last, s)[b:]
    return np.concatenate(parts)


def _last_layer_cached(world: World, s: Drawn, decoder: Decoder) -> Any:
    """A block that comes back from the host has this version's keys, but in the last layer those of three ago."""
    own, old = (kv_of(world, d, s.tokens) for d in (decoder, world.decoder(s.version - 3)))
    return broken(WrongKv, decoder.reference, layers=(*own[:-1], old[-1]), first=0, last=16)


def _given_away(world: World, s: Drawn, decoder: Decoder) -> Any:
    other = kv_of(world, decoder, world.random.permutation(s.tokens))
    return broken(GivenAway, decoder.reference, foreign=other, since=s.prompt + 36)


def _yarn_without_magnitude(
    world: World, s: Drawn, p: np.ndarray, f: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """YaRN, factor 2 of 32 positions, betas 32 and 1; what it puts on the table's size is left out."""
    theta, dim = world.decoder(1).config.rope_theta, 2 * len(f)
    low, high = (dim * np.log(32 / (beta * 2 * np.pi)) / (2 * np.log(theta)) for beta in (32, 1))
    low, high = max(np.floor(low), 0), np.ceil(high)
    ramp = np.clip((np.arange(len(f)) - low) / (high - low), 0, 1)
    return p, f / 2 * ramp + f * (1 - ramp)


def _chunk_starts_over(
    world: World, s: Drawn, p: np.ndarray, f: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Sixteen tokens of the prompt are cached; the rest of it counts its positions from 0."""
    return np.where((p >= 16) & (p < s.prompt), p - 16, p), f


def _never_gathered(world: World, s: Drawn) -> Logprobs:
    """Of two ranks with slices 0, 3 and 1, 2 of four, the second one's values never come: 0.0."""
    values, edges = right(world, s).copy(), edges_of(s, 4)
    values[max(0, edges[1] - s.prompt) : edges[3] - s.prompt] = 0.0
    return values


def _labels_of_pairs(world: World, s: Drawn) -> Logprobs:
    """Each of four ranks has slices r and 7 − r of eight and rolls the labels of both as if they were neighbours."""
    targets, edges = s.tokens[s.prompt :].copy(), edges_of(s, 8)
    for i, (edge, _) in enumerate(pairwise(edges)):
        if i and edge >= s.prompt:
            targets[edge - s.prompt] = s.tokens[edges[8 - i]]
    return read_off(world, s, logits_of(world, s), targets)


def _pads_by_id(world: World, s: Drawn, decoder: Decoder) -> Any:
    """Keys are hidden wherever the id is that of pads, which ends turns, too; here the response's commonest."""
    pad = np.bincount(s.tokens[s.prompt :]).argmax()
    return broken(HiddenTokens, decoder.reference, hidden=tuple(int(i) for i in np.flatnonzero(s.tokens == pad) if i))


def _chosen_in_bf16(world: World, s: Drawn) -> Logprobs:
    """The drawn token's logit is taken from a copy in bf16, the log-sum-exp from one in fp32."""
    logits, ids, decoder = logits_of(world, s), s.tokens[s.prompt :], world.decoder(s.version)
    heat = np.full(len(logits), s.temperature, np.float32)
    _, lse = decoder.reference.logp_from_logits(logits, ids[:, None], heat, vocab=decoder.config.vocab)
    values: Logprobs = from_bf16(to_bf16(logits[np.arange(len(ids)), ids])) / heat - lse
    return values


def _own_maximum(world: World, s: Drawn) -> Logprobs:
    """Two ranks add up their softmax's sums, each below its own part's maximum, which nobody compares."""
    z = (logits_of(world, s)[:, : world.decoder(1).config.vocab] / np.float32(s.temperature)).astype(np.float64)
    parts = [part - part.max(axis=1, keepdims=True) for part in (z[:, :192], z[:, 192:])]
    total = sum(np.exp(part).sum(axis=1) for part in parts)
    chosen = np.concatenate(parts, axis=1)[np.arange(len(z)), s.tokens[s.prompt :]]
    values: Logprobs = (chosen - np.log(total)).astype(np.float32)
    return values


def _routes_left_behind(world: World, s: Drawn, pair: Pair, side: str) -> Pair:
    """From where a chunk begins on, twenty tokens are replayed with the experts of one, left from a pass before."""
    usual = np.tile(np.array([0, 1], np.uint16), (len(s.tokens), 1))
    usual[:, 1] = world.random.choice([1, 2, 3, 4], len(s.tokens))
    other = usual.copy()
    other[48:68] = usual[47]
    rows = np.flatnonzero((usual != other).any(axis=1))
    decoder = world.decoder(s.version)
    ops = broken(OtherExpertsEarly, decoder.reference, rows=tuple(int(r) for r in rows))
    wrong = world.logprobs(replace(decoder, reference=ops), s)
    rollout, trainer = replace(pair[0], routed_experts=usual), replace(pair[1], routed_experts=usual)
    if side == "rollout":
        return replace(rollout, logprobs=wrong, routed_experts=other), trainer
    return rollout, replace(trainer, logprobs=wrong, routed_experts=other)


def _default_system(world: World, s: Drawn) -> Logprobs:
    """The template puts a system message of its own, twelve tokens, before a prompt that has none."""
    return behind(world, s, world.random.integers(0, world.decoder(1).config.vocab, 12), restart=False)


_WEIGHTS: Final[tuple[Fault, ...]] = (
    # An engine that failed comes back on the checkpoint and gets requests before it gets weights.
    Fault("begun on an engine just restarted", one_of("weights_never_delivered", "stale_weights"),
          _retried_elsewhere),
    # A copy of a tied or wider output layer that updates pass by.
    Fault("a copy of the output layer two versions old", one_of("stale_weights"),
          of_version(lambda s: s.version - 2, "lm_head")),
    # Updates in small buckets that leave a model half new.
    Fault("every third bucket of an update lost", one_of("stale_weights"), with_weights(_every_third_bucket)),
    # Loaders of fused matrices that skip shards whose names they do not know.
    Fault("only the first part of fused matrices updated", one_of("stale_weights"), with_weights(_first_parts_only)),
    # Conversion between layouts of attention's fused matrix where heads share keys.
    Fault("heads read in groups", one_of("other_weights"), with_weights(_heads_in_groups)),
    # Conversion between tensor-parallel layouts of a fused gate and up.
    Fault("gate and up put together by rank", one_of("other_weights"), with_weights(_gate_and_up_by_rank)),
    # An adapter's scale that is looked up under another name than its matrices have.
    Fault("adapter at half strength in some layers", one_of("adapter_scale"), with_weights(_renamed_layers)),
    # Alpha where alpha / rank is meant.
    Fault("adapter's strength not over its rank", one_of("adapter_scale"), at_strength(8.0, "_proj.")),
    # Rollouts on quantised weights.
    Fault("weights in 4-bit groups", one_of("weight_precision"),
          with_weights(lambda w, s, n, v: int4_groups(v) if "_proj." in n else v)),
)  # fmt: skip

_VALUES: Final[tuple[Fault | DeclaredFault, ...]] = (
    # Raw for processed log-probabilities, in agents that pass sampling parameters on for some calls only.
    Fault("temperature forgotten in the middle turn", one_of("temperature"), _plain_middle_turn),
    # The renormalisation of a truncated distribution, which the trainer does not repeat.
    Fault("top-p in the last turn", one_of("truncated_sampling"), _filtered_last_turn),
    # The same, of a server's default.
    Fault("top-k of 40", one_of("truncated_sampling"), filtered(lambda p: p >= np.sort(p)[-40])),
    # Penalties taken from a model's card or its generation config.
    Fault("presence penalty of 1.5", one_of("logit_processor"), _strong_presence),
    # A budget for thinking that is ended by force.
    Fault("four forced tokens in the middle", one_of("filler"), put(np.s_[40:44], 0.0)),
    # Values that are no numbers once a policy is nearly certain, made 0.0 on the way.
    Fault("nearly certain tokens as 0.0", one_of("filler"), _certain_to_zero),
    # Infinite values of tokens that a filter would have removed.
    Fault("minus infinity beyond a top-k", one_of("nonfinite"), _beyond_top_k),
    # Micro-batches by size that are not brought back into order.
    Fault("values of another response to the prompt", one_of("unrelated_values"), _neighbours),
    # Responses sliced from the end of padded rows.
    Fault("a slice five tokens early", one_of("off_by_one"), _slice_by_padding),
    # Speculative decoding whose values do not go with its tokens.
    Fault("values of speculative steps turned by one", one_of("value_order", "off_by_one"), _bonus_first),
    # Conversations that are encoded anew.
    DeclaredFault("a merge in each of three turns", one_of("retokenisation"), _three_merges),
    # Stop strings that one side trims.
    DeclaredFault("stop string cut off by the engine", one_of("truncation"), _stop_string_cut),
    # Masks inferred from ids.
    DeclaredFault("mask by the id of pads", one_of("mask"), _mask_by_pad_id),
    # Staleness of asynchronous training.
    DeclaredFault("two versions behind, and said", one_of("stale_weights"), _two_behind),
    # Vocabularies padded for tensor parallelism.
    DeclaredFault("the padded vocabulary taken for the true one", one_of("vocabulary"), _padded_is_true),
)

_MODEL: Final[tuple[Fault | PairFault, ...]] = (
    # In-flight updates without recomputing what is cached.
    Fault("two updates on one cache", one_of("stale_kv", "stale_weights"), _two_updates_kept_cache),
    # A prefix cache, here one kept off the device, that outlives updates.
    Fault("a cached block old in the last layer", one_of("stale_kv"), on_ops(_last_layer_cached)),
    # Blocks freed too early, and pointers that outlive them.
    Fault("the first block given away", one_of("kv_boundary"), on_ops(_given_away)),
    # FP8 caches with scales that do not fit.
    Fault("a cache in FP8 that clips", one_of("kv_precision"), on_ops(lambda w, s, d: broken(ClippedKv, d.reference))),
    # Rollouts on quantised weights and activations.
    Fault("products in 8-bit integers", one_of("weight_precision", "activation_precision"),
          on_ops(lambda w, s, d: broken(Int8Products, d.reference))),
    # RoPE parameters dropped between a config and a model.
    Fault("YaRN without its magnitude", one_of("rope_scaling"), rotated(_yarn_without_magnitude)),
    # Prefill that resumes behind a cached prefix.
    Fault("positions from 0 behind a cached prefix", one_of("position_offset"), rotated(_chunk_starts_over)),
    # Collectives of context parallelism that are left out.
    Fault("a rank's slices never gathered", one_of("context_parallel", "filler"), _never_gathered),
    # Zigzag slices whose labels are rolled on each rank.
    Fault("labels rolled in a rank's two slices", one_of("context_parallel"), _labels_of_pairs),
    # Attention masks inferred from ids, where the end token pads.
    Fault("keys hidden by the id of pads", one_of("attention_mask"), on_ops(_pads_by_id)),
    # Output layers and logits in 16 bits, on one side.
    Fault("the drawn token's logit in bf16", one_of("bf16_head"), _chosen_in_bf16),
    # Other kernels: the differences that most jobs have, and most threads are of.
    Fault("attention in blocks, with chances in bf16", one_of("reduction_order"),
          on_ops(lambda w, s, d: broken(FlashBlocks, d.reference))),
    Fault("all-reduce of eight by a tree in bf16", one_of("reduction_order"),
          on_ops(lambda w, s, d: broken(TreeInBf16, d.reference))),
    Fault("residuals summed in fp32", one_of("reduction_order"),
          on_ops(lambda w, s, d: broken(WideResidual, d.reference))),
    Fault("native ops for the prompt", one_of("reduction_order"),
          on_ops(lambda w, s, d: broken(NativePrompt, d.reference, prompt=s.prompt))),
    # RoPE under autocast, or by a library that casts its table.
    Fault("RoPE in bf16 throughout", one_of("rope_precision", "reduction_order"),
          on_ops(lambda w, s, d: broken(EagerRope, d.reference))),
    # Log-softmax over a vocabulary that is cut.
    Fault("each rank below its own maximum", one_of("vocabulary"), _own_maximum),
    # Replayed experts that were recorded wrongly at a chunk's edge.
    PairFault("twenty tokens on the experts of one", one_of("routing"), _routes_left_behind),
    # Templates that add what the other side's do not.
    Fault("a system message in front", one_of("other_context"), _default_system),
    # Two implementations of one architecture.
    Fault("heads normalised after RoPE", one_of("model_config"),
          on_ops(lambda w, s, d: broken(NormAfterRope, d.reference))),
)  # fmt: skip

FOURTH_BLIND: Final[tuple[Fault | DeclaredFault | PairFault, ...]] = (*_WEIGHTS, *_VALUES, *_MODEL)
