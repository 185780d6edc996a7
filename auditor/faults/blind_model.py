"""The rest of the judge's list: caches, positions, context parallelism, orders of sums, routing, masks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from auditor.compare import Logprobs
from auditor.faults.blind import REPORTS, VALUES, WEIGHTS
from auditor.faults.blind_ops import OtherExpertsEarly, Ring, SliceAlone, SplitKv, Window
from auditor.faults.declared import DeclaredFault
from auditor.faults.ops import WrongKv, broken
from auditor.faults.reported import right, with_weights
from auditor.faults.suite import (
    Break,
    Fault,
    Pair,
    PairFault,
    kv_of,
    logits_of,
    on_ops,
    one_of,
    other_base,
    read_off,
    rotated,
)
from auditor.faults.world import Drawn, World
from rl_kernel.contracts import model_contract
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Reference


def kv_of_version(back: int, first: int, last: int) -> Break:
    """Keys and values of tokens first..last are those of the weights `back` versions ago."""

    def make(world: World, s: Drawn, decoder: Decoder) -> Any:
        old = kv_of(world, world.decoder(s.version - back), s.tokens)
        return broken(WrongKv, decoder.reference, layers=old, first=first, last=last)

    return on_ops(make)


def foreign_kv(first: int, last: int) -> Break:
    """Keys and values of tokens first..last are those of another sequence."""

    def make(world: World, s: Drawn, decoder: Decoder) -> Any:
        other = kv_of(world, decoder, world.random.permutation(s.tokens))
        return broken(WrongKv, decoder.reference, layers=other, first=first, last=last)

    return on_ops(make)


def ntk(factor: float) -> Break:
    """The base grows so that the slowest frequency is `factor` times slower."""
    return other_base(10_000.0 * factor ** (32 / 30))


def _llama3(world: World, s: Drawn, p: np.ndarray, f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factor 8, low 1, high 4, of 64 positions at first."""
    turns = 64 * f / (2 * np.pi)
    blend = np.clip((turns - 1) / (4 - 1), 0, 1)
    return p, f * (blend + (1 - blend) / 8)


def _yarn(world: World, s: Drawn) -> Logprobs:
    """Factor 4 of 64 positions, beta 32 and 1, and its magnitude on the table."""
    decoder = world.decoder(s.version)
    dim, theta = decoder.config.head_dim, decoder.config.rope_theta
    index = np.arange(dim // 2)
    f = np.float64(theta) ** (-2 * index / dim)
    low, high = (dim * np.log(64 / (beta * 2 * np.pi)) / (2 * np.log(theta)) for beta in (32, 1))
    ramp = np.clip((index - max(np.floor(low), 0)) / max(np.ceil(high) - max(np.floor(low), 0), 1e-3), 0, 1)
    angle = np.arange(len(s.tokens))[:, None] * (f / 4 * ramp + f * (1 - ramp))
    grown = 0.1 * np.log(4) + 1
    table = ((np.cos(angle) * grown).astype(np.float32), (np.sin(angle) * grown).astype(np.float32))
    return world.logprobs(replace(decoder, rope=table), s)


def edges_of(s: Drawn, parts: int) -> list[int]:
    """Where `parts` slices of a whole sample begin and end."""
    return [round(i * len(s.tokens) / parts) for i in range(parts + 1)]


def in_order(order: tuple[int, ...]) -> Break:
    """The values of a sample's slices, prompt and response, put together in another order."""

    def wrong(world: World, s: Drawn) -> Logprobs:
        values = right(world, s)
        spans = [values[max(0, a - s.prompt) : max(0, b - s.prompt)] for a, b in pairwise(edges_of(s, len(order)))]
        return np.concatenate([spans[i] for i in order])

    return wrong


def _labels_of_eight(world: World, s: Drawn) -> Logprobs:
    """Labels are rolled in each of eight slices: the last row of a slice looks up the slice's own first token."""
    targets, edges = s.tokens[s.prompt :].copy(), edges_of(s, 8)
    for first, last in pairwise(edges):
        if s.prompt <= last < len(s.tokens):
            targets[last - s.prompt] = s.tokens[first]
    return read_off(world, s, logits_of(world, s), targets)


def _half_alone(world: World, s: Drawn, decoder: Decoder) -> Any:
    half = len(s.tokens) // 2
    return broken(SliceAlone, decoder.reference, first=half, last=len(s.tokens))


def segments(count: int) -> Break:
    """Row-parallel sums in `count` parts."""
    contract = model_contract("portable", segments=count)
    return lambda world, s: world.logprobs(replace(world.decoder(s.version), contract=contract), s)


def on_profile(name: str) -> Break:
    """The whole model by another maker's matrix units."""
    return on_ops(lambda w, s, d: Reference.of(model_contract(name, segments=2)))


def routed_early(share: float) -> Callable[[World, Drawn, Pair, str], Pair]:
    """A share of the tokens goes to another expert in the first layer, so that those after them see it too."""

    def bend(world: World, s: Drawn, pair: Pair, side: str) -> Pair:
        count = max(1, int(share * len(s.tokens)))
        rows = np.sort(world.random.choice(np.arange(s.prompt, len(s.tokens) - 1), count, replace=False))
        decoder = world.decoder(s.version)
        ops = broken(OtherExpertsEarly, decoder.reference, rows=tuple(int(r) for r in rows))
        wrong = world.logprobs(replace(decoder, reference=ops), s)
        usual = np.tile(np.array([3, 5], np.uint16), (len(s.tokens), 1))
        other = usual.copy()
        other[rows, 0] = 6
        rollout, trainer = replace(pair[0], routed_experts=usual), replace(pair[1], routed_experts=usual)
        if side == "rollout":
            return replace(rollout, logprobs=wrong, routed_experts=other), trainer
        return rollout, replace(trainer, logprobs=wrong, routed_experts=other)

    return bend


MODEL: Final[tuple[Fault, ...]] = (
    Fault("a cached block of weights two versions ago", one_of("stale_kv"), kv_of_version(2, 0, 16)),
    Fault("eight keys of another sequence", one_of("kv_boundary", "stale_kv"), foreign_kv(40, 48)),
    Fault("a chunk that sees only itself", one_of("kv_boundary", "attention_mask"),
          on_ops(lambda w, s, d: broken(SliceAlone, d.reference, first=64, last=96))),
    Fault("RoPE base grown for four times the length", one_of("rope_scaling"), ntk(4.0)),
    Fault("RoPE as in Llama 3", one_of("rope_scaling"), rotated(_llama3)),
    Fault("RoPE by YaRN", one_of("rope_scaling"), _yarn),
    Fault("response positions two early", one_of("position_offset"),
          rotated(lambda w, s, p, f: (np.where(p >= s.prompt, p - 2, p), f))),
    Fault("eight slices in the order of their ranks", one_of("context_parallel", "value_order"),
          in_order((0, 7, 1, 6, 2, 5, 3, 4))),
    Fault("the second half sees only itself", one_of("context_parallel", "attention_mask", "kv_boundary"),
          on_ops(_half_alone)),
    Fault("labels rolled in eight slices", one_of("context_parallel"), _labels_of_eight),
    Fault("sums in eight parts", one_of("reduction_order"), segments(8)),
    Fault("another maker's matrix units", one_of("reduction_order"), on_profile("cdna3")),
    Fault("all-reduce by a ring of four", one_of("reduction_order"),
          on_ops(lambda w, s, d: broken(Ring, d.reference))),
    Fault("attention in three parts", one_of("reduction_order"),
          on_ops(lambda w, s, d: broken(SplitKv, d.reference))),
    Fault("a window of 32 in one layer", one_of("attention_mask"),
          on_ops(lambda w, s, d: broken(Window, d.reference, size=32, layers=(1,)))),
    Fault("no norm of the queries", one_of("model_config", "other_weights"),
          with_weights(lambda w, s, n, v: np.full_like(v, 0x3F80) if "q_norm" in n else v)),
)  # fmt: skip

ROUTES: Final[tuple[PairFault, ...]] = (
    PairFault("other experts in the first layer", one_of("routing"), routed_early(0.05)),
)

BLIND: Final[tuple[Fault | DeclaredFault | PairFault, ...]] = (*WEIGHTS, *VALUES, *REPORTS, *MODEL, *ROUTES)
