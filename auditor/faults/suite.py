"""Faults that only the numbers show: what one side does wrong, and which causes may be named first for it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from auditor.compare import Logprobs
from auditor.faults.blind_ops import SliceAlone
from auditor.faults.ops import HiddenKeys, KeepKv, NativeProducts, OtherExperts, ThreeParts, WrongKv, broken
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from auditor.records import RolloutRecord, TrainerRecord
from rl_kernel.contracts import model_contract
from rl_kernel.reference.model import Decoder

Pair = tuple[RolloutRecord, TrainerRecord]
Break = Callable[[World, Drawn], Logprobs]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one side. causes: right answers. wrong: the side's log-probabilities with the fault inside."""

    name: str
    causes: frozenset[str]
    wrong: Break


@dataclass(frozen=True, slots=True)
class PairFault:
    """A fault of one side of which the reports say more than values. bend: the pair with it on the given side."""

    name: str
    causes: frozenset[str]
    bend: Callable[[World, Drawn, Pair, str], Pair]


def _stale(behind: int) -> Break:
    return lambda world, s: world.logprobs(world.decoder(s.version - behind), s)


def _first_version(world: World, s: Drawn) -> Logprobs:
    return world.logprobs(world.decoder(1), s)


def _corrupt(world: World, s: Drawn) -> Logprobs:
    """One matrix arrives transposed in part: rows of one projection in another order."""
    weights = dict(world.decoder(s.version).weights)
    name = "model.layers.0.self_attn.v_proj.weight"
    weights[name] = np.roll(weights[name], 1, axis=0)
    return world.logprobs(world.with_weights(weights), s)


def _at_temperature(of_stated: Callable[[float], float]) -> Break:
    return lambda world, s: world.logprobs(world.decoder(s.version), s, of_stated(s.temperature))


def logits_of(world: World, s: Drawn, shift: int = 0) -> np.ndarray:
    """fp32 [R,V]: the rows that the response's values are read from, moved by `shift`."""
    decoder = world.decoder(s.version)
    rows = np.clip(np.arange(s.prompt - 1, len(s.tokens) - 1) + shift, 0, len(s.tokens) - 1)
    return decoder.reference.gemm_fp32(decoder.hidden([s.tokens])[rows], head_of(decoder))


def head_of(decoder: Decoder) -> np.ndarray:
    """The weights of the output layer, bf16 [V,E]."""
    return decoder.weights["model.embed_tokens.weight" if decoder.config.tied else "lm_head.weight"]


def read_off(world: World, s: Drawn, logits: np.ndarray, targets: np.ndarray | None = None) -> Logprobs:
    """Log-probabilities float32 [R] of the response (or of `targets`) in logits [R,V]."""
    decoder = world.decoder(s.version)
    ids = s.tokens[s.prompt :] if targets is None else targets
    heat = np.full(len(logits), s.temperature, np.float32)
    return decoder.reference.logp_from_logits(logits, ids[:, None], heat, vocab=decoder.config.vocab)[0][:, 0]


def filtered(keep: Callable[[np.ndarray], np.ndarray]) -> Break:
    """keep: probabilities of a row → which tokens stay."""

    def wrong(world: World, s: Drawn) -> Logprobs:
        logits = logits_of(world, s)
        p = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float64) / s.temperature)
        p /= p.sum(axis=1, keepdims=True)
        for row, chances, target in zip(logits, p, s.tokens[s.prompt :], strict=True):
            gone = ~keep(chances)
            gone[target] = False
            row[: len(chances)][gone] = -np.inf
        return read_off(world, s, logits)

    return wrong


def _top_k(k: int) -> Break:
    return filtered(lambda p: p >= np.sort(p)[-k])


def _top_p(mass: float) -> Break:
    def keep(p: np.ndarray) -> np.ndarray:
        order = np.argsort(-p)
        count = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
        kept = np.zeros(len(p), np.bool_)
        kept[order[:count]] = True
        return kept

    return filtered(keep)


def _rolled(by: int) -> Break:
    def wrong(world: World, s: Drawn) -> Logprobs:
        return np.roll(world.logprobs(world.decoder(s.version), s), by)

    return wrong


def _next_row(world: World, s: Drawn) -> Logprobs:
    return read_off(world, s, logits_of(world, s, 1))


def _next_token(world: World, s: Drawn) -> Logprobs:
    return read_off(world, s, logits_of(world, s), np.append(s.tokens[s.prompt + 1 :], s.tokens[-1]))


def _zero_at(choose: Callable[[World, int], np.ndarray]) -> Break:
    def wrong(world: World, s: Drawn) -> Logprobs:
        values = world.logprobs(world.decoder(s.version), s).copy()
        values[choose(world, len(values))] = 0.0
        return values

    return wrong


def on_ops(make: Callable[[World, Drawn, Decoder], Any]) -> Break:
    """make: the ops that the side runs on."""

    def wrong(world: World, s: Drawn) -> Logprobs:
        decoder = world.decoder(s.version)
        return world.logprobs(replace(decoder, reference=make(world, s, decoder)), s)

    return wrong


def kv_of(world: World, decoder: Decoder, tokens: np.ndarray) -> Any:
    """Keys and values of each layer."""
    keeper = broken(KeepKv, decoder.reference)
    replace(decoder, reference=keeper).hidden([tokens])
    return tuple(keeper.kept)


def _stale_prefix(world: World, s: Drawn, decoder: Decoder) -> Any:
    old = kv_of(world, world.decoder(s.version - 1), s.tokens)
    return broken(WrongKv, decoder.reference, layers=old, first=0, last=s.prompt - 1)


def _updated_midway(world: World, s: Drawn) -> Logprobs:
    """New weights arrive while the sample is generated: old values and old keys before, new ones after."""
    half = s.prompt + (len(s.tokens) - s.prompt) // 2
    decoder, before = world.decoder(s.version), world.decoder(s.version - 1)
    old = kv_of(world, before, s.tokens)
    on_old = replace(decoder, reference=broken(WrongKv, decoder.reference, layers=old, first=0, last=half))
    cut = half - s.prompt + 1
    return np.concatenate([world.logprobs(before, s)[:cut], world.logprobs(on_old, s)[cut:]])


def _foreign_block(world: World, s: Drawn, decoder: Decoder) -> Any:
    """From a multiple of 64 on, one block of 16 holds another sequence's keys and values."""
    start = -(-(s.prompt + 4) // 64) * 64
    other = world.random.permutation(s.tokens)
    return broken(WrongKv, decoder.reference, layers=kv_of(world, decoder, other), first=start, last=start + 16)


def rotated(change: Callable[[World, Drawn, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> Break:
    """change: positions and frequencies → the ones that the side uses."""

    def wrong(world: World, s: Drawn) -> Logprobs:
        decoder = world.decoder(s.version)
        dim = decoder.config.head_dim
        frequencies = np.float64(decoder.config.rope_theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        positions, used = change(world, s, np.arange(len(s.tokens), dtype=np.float64), frequencies)
        angle = positions[:, None] * used[None, :]
        table = (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
        return world.logprobs(replace(decoder, rope=table), s)

    return wrong


def other_base(theta: float) -> Break:
    """Rotary frequencies of another base."""

    def change(world: World, s: Drawn, positions: np.ndarray, frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        dim = 2 * len(frequencies)
        return positions, np.float64(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)

    return rotated(change)


def _gap(tokens: int) -> Break:
    return rotated(lambda world, s, p, f: (np.where(p >= s.prompt, p + tokens, p), f))


def _bf16_logits(world: World, s: Drawn) -> Logprobs:
    return read_off(world, s, from_bf16(to_bf16(logits_of(world, s))))


def _bf16_values(world: World, s: Drawn) -> Logprobs:
    return from_bf16(to_bf16(world.logprobs(world.decoder(s.version), s)))


def _segments(count: int) -> Break:
    return lambda world, s: world.logprobs(
        replace(world.decoder(s.version), contract=model_contract("portable", segments=count)), s
    )


def _edges(s: Drawn, parts: int) -> tuple[int, ...]:
    return tuple(round(i * len(s.tokens) / parts) for i in range(1, parts))


def _cp_labels(world: World, s: Drawn) -> Logprobs:
    """Labels are shifted inside each of four slices, so that the last row of a slice gets a wrong one."""
    targets = s.tokens[s.prompt :].copy()
    for edge in _edges(s, 4):
        if edge >= s.prompt:
            targets[edge - s.prompt] = s.tokens[0]
    return read_off(world, s, logits_of(world, s), targets)


def _nan(world: World, s: Drawn) -> Logprobs:
    values = world.logprobs(world.decoder(s.version), s).copy()
    values[world.random.integers(len(values))] = np.nan
    return values


def one_of(*causes: str) -> frozenset[str]:
    """Causes of which each is a right answer."""
    return frozenset(causes)


FAULTS: Final[tuple[Fault, ...]] = (
    Fault("weights one version old", one_of("stale_weights"), _stale(1)),
    Fault("weights two versions old", one_of("stale_weights"), _stale(2)),
    Fault("adapter not merged, or never delivered", one_of("weights_never_delivered"), _first_version),
    Fault("one projection's rows in another order", one_of("other_weights"), _corrupt),
    Fault("temperature not applied", one_of("temperature"), _at_temperature(lambda t: 1.0)),
    Fault("temperature applied twice", one_of("temperature"), _at_temperature(lambda t: t * t)),
    Fault("another temperature", one_of("temperature"), _at_temperature(lambda t: t + 0.137)),
    Fault("top-k on one side", one_of("truncated_sampling"), _top_k(20)),
    Fault("top-p on one side", one_of("truncated_sampling"), _top_p(0.9)),
    Fault("min-p on one side", one_of("truncated_sampling"), filtered(lambda p: p >= 0.02 * p.max())),
    Fault("values one token late", one_of("off_by_one"), _rolled(1)),
    Fault("values one token early", one_of("off_by_one"), _rolled(-1)),
    Fault("looked up in the next row", one_of("off_by_one"), _next_row),
    Fault("next token looked up", one_of("off_by_one"), _next_token),
    Fault("forced end with 0.0", one_of("filler"), _zero_at(lambda w, n: np.array([n - 1]))),
    Fault(
        "speculated tokens with 0.0", one_of("filler"), _zero_at(lambda w, n: w.random.choice(n, n // 5, replace=False))
    ),
    Fault("prefix cache of older weights", one_of("stale_kv"), on_ops(_stale_prefix)),
    Fault("weights updated in mid-generation", one_of("stale_kv"), _updated_midway),
    Fault("a KV block of another sequence", one_of("kv_boundary"), on_ops(_foreign_block)),
    Fault("linear RoPE scaling", one_of("rope_scaling"), rotated(lambda w, s, p, f: (p / 4.0, f))),
    Fault("RoPE scaled by 3", one_of("rope_scaling"), rotated(lambda w, s, p, f: (p / 3.0, f))),
    Fault("another RoPE base", one_of("rope_scaling"), other_base(500_000.0)),
    Fault("response positions one late", one_of("position_offset"), _gap(1)),
    Fault("response positions eight late", one_of("position_offset"), _gap(8)),
    Fault("all positions one late", one_of("position_offset"), rotated(lambda w, s, p, f: (p + 1.0, f))),
    Fault("logits in bf16", one_of("bf16_head"), _bf16_logits),
    Fault("log-probabilities in bf16", one_of("bf16_head"), _bf16_values),
    Fault("row-parallel sums in 4 parts", one_of("reduction_order"), _segments(4)),
    Fault("row-parallel sums in one part", one_of("reduction_order"), _segments(1)),
    Fault(
        "products in three parts", one_of("reduction_order"), on_ops(lambda w, s, d: broken(ThreeParts, d.reference))
    ),
    Fault("native products", one_of("reduction_order"), on_ops(lambda w, s, d: broken(NativeProducts, d.reference))),
    Fault("labels rolled in context-parallel slices", one_of("context_parallel"), _cp_labels),
    Fault(
        "slice edges that see nothing before them",
        one_of("context_parallel"),
        on_ops(lambda w, s, d: broken(HiddenKeys, d.reference, edges=_edges(s, 4), layers=d.config.layers)),
    ),
    Fault("a NaN", one_of("nonfinite"), _nan),
    Fault(
        "a chunk that does not see what is before it",
        one_of("kv_boundary"),
        on_ops(lambda w, s, d: broken(SliceAlone, d.reference, first=48, last=len(s.tokens))),
    ),
)


def routed(world: World, sample: Drawn, pair: Pair, side: str) -> Pair:
    """A tenth of the tokens goes to other experts on one side, and both sides say which experts they used."""
    rows = np.sort(world.random.choice(len(sample.tokens) - 1, len(sample.tokens) // 10, replace=False))
    decoder = world.decoder(sample.version)
    ops = broken(OtherExperts, decoder.reference, rows=tuple(int(r) for r in rows), layers=decoder.config.layers)
    wrong = world.logprobs(replace(decoder, reference=ops), sample)
    usual = np.tile(np.array([0, 1], np.uint16), (len(sample.tokens), 1))
    other = usual.copy()
    other[rows, 1] = 2
    rollout, trainer = replace(pair[0], routed_experts=usual), replace(pair[1], routed_experts=usual)
    if side == "rollout":
        return replace(rollout, logprobs=wrong, routed_experts=other), trainer
    return rollout, replace(trainer, logprobs=wrong, routed_experts=other)
