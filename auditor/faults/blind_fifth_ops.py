"""For the fifth blind list: the reference with one op as an engine has it; reports that differ in more than values."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from auditor.faults.ops import OtherExperts, broken
from auditor.faults.suite import Pair
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import F32, I32, Bits, Reference

_E4M3_MOST, _E4M3_LEAST_EXPONENT, _E4M3_MANTISSA = 448.0, -6, 3
_BLOCK = 128


def e4m3(x: F32) -> F32:
    """Rounded to the nearest float8_e4m3fn, saturating."""
    held = np.clip(x, -_E4M3_MOST, _E4M3_MOST)
    exponent = np.floor(np.log2(np.maximum(np.abs(held), np.float32(2.0**-20))))
    step = np.exp2(np.maximum(exponent, _E4M3_LEAST_EXPONENT) - _E4M3_MANTISSA).astype(np.float32)
    rounded: F32 = (np.round(held / step) * step).astype(np.float32)
    return rounded


def _scaled(x: F32) -> F32:
    """Rounded to e4m3 under one scale for all of x, and back."""
    scale = np.float32(max(float(np.abs(x).max()), 1e-10) / _E4M3_MOST)
    return np.asarray(e4m3(x / scale) * scale, np.float32)


def _cuts(length: int, parts: int) -> list[int]:
    return [round(i * length / parts) for i in range(parts + 1)]


@dataclass(frozen=True, slots=True)
class SplitK(Reference):
    """Products whose K is cut in equal parts, added left to right: the kernel that small batches get."""

    parts: int = 4

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """x[M,K], w[N,K] → bf16 [M,N]."""
        return to_bf16(self.gemm_fp32(x, w))

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        """x[M,K], w[N,K] → fp32 [M,N]."""
        total = np.zeros((x.shape[0], w.shape[0]), np.float32)
        for first, last in pairwise(_cuts(w.shape[1], self.parts)):
            total += Reference.gemm_fp32(self, x[:, first:last].copy(), w[:, first:last].copy())
        return total


@dataclass(frozen=True, slots=True)
class RoundedRanks(Reference):
    """Row-parallel products whose partial sums are rounded to bf16 before the all-reduce adds them."""

    ranks: int = 4

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """x[M,K], w[N,K] → bf16 [M,N]."""
        if segments == 1:
            return Reference.gemm(self, x, w)
        total = np.zeros((x.shape[0], w.shape[0]), np.float32)
        for first, last in pairwise(_cuts(w.shape[1], self.ranks)):
            part = Reference.gemm_fp32(self, x[:, first:last].copy(), w[:, first:last].copy())
            total = from_bf16(to_bf16(total + from_bf16(to_bf16(part))))
        return to_bf16(total)


@dataclass(frozen=True, slots=True)
class EagerAttention(Reference):
    """Attention written out: scores and probabilities are bf16 tensors, the softmax between them is fp32."""

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence; running maximum and sum are not made."""
        share = q.shape[1] // k.shape[1]
        hidden = np.triu(np.ones((len(q), len(k)), np.bool_), len(k) - len(q) + 1)
        out = np.empty_like(q)
        for head in range(q.shape[1]):
            wide_q, wide_k, wide_v = (from_bf16(a) for a in (q[:, head], k[:, head // share], v[:, head // share]))
            scores = from_bf16(to_bf16(wide_q @ wide_k.T)) * np.float32(q.shape[2] ** -0.5)
            scores = np.where(hidden, np.float32(-np.inf), from_bf16(to_bf16(scores)))
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            p = from_bf16(to_bf16(p / p.sum(axis=1, keepdims=True)))
            out[:, head] = to_bf16(p @ wide_v)
        none = np.zeros(q.shape[:2], np.float32)
        return out, none, none


@dataclass(frozen=True, slots=True)
class Fp8Kv(Reference):
    """Keys and values are kept in e4m3 with the scale 1.0 that an engine takes where none was calibrated."""

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's."""
        k, v = (to_bf16(e4m3(from_bf16(a))) for a in (k, v))
        return Reference.attention(self, q, k, v, cu_q, cu_k)


@dataclass(frozen=True, slots=True)
class Fp8Linear(Reference):
    """The layers' products in e4m3: weights under a scale a block of 128×128, inputs under one a token and 128."""

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """x[M,K], w[N,K] → bf16 [M,N]."""
        wide_x, wide_w = from_bf16(x), from_bf16(w)
        for at in range(0, w.shape[1], _BLOCK):
            columns = slice(at, at + _BLOCK)
            for row in range(len(x)):
                wide_x[row, columns] = _scaled(wide_x[row, columns])
            for row in range(0, len(w), _BLOCK):
                wide_w[row : row + _BLOCK, columns] = _scaled(wide_w[row : row + _BLOCK, columns])
        return to_bf16(np.asarray(wide_x @ wide_w.T, np.float32))


@dataclass(frozen=True, slots=True)
class Windowed(Reference):
    """In every other layer, from the first on, a token sees the last `span` ones only, itself included."""

    span: int = 40
    at: list[int] = field(default_factory=lambda: [0])

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        self.at[0] += 1
        if self.at[0] % 2 == 0:
            return Reference.attention(self, q, k, v, cu_q, cu_k)
        seen = [np.arange(max(0, row + 1 - self.span), row + 1) for row in range(len(q))]
        keys = np.concatenate(seen)
        each_q = np.arange(len(q) + 1, dtype=np.int32)
        each_k = np.cumsum([0, *(len(rows) for rows in seen)]).astype(np.int32)
        return Reference.attention(self, q, k[keys].copy(), v[keys].copy(), each_q, each_k)


def _routes(world: World, sample: Drawn, pair: Pair, side: str, usual: np.ndarray, other: np.ndarray) -> Pair:
    """Rows whose experts differ are computed by others in the last layer; both sides report what they used."""
    decoder = world.decoder(sample.version)
    rows = tuple(int(row) for row in np.flatnonzero((usual != other).any(axis=1)))
    ops = broken(OtherExperts, decoder.reference, rows=rows, layers=decoder.config.layers)
    wrong = world.logprobs(replace(decoder, reference=ops), sample)
    rollout, trainer = replace(pair[0], routed_experts=usual), replace(pair[1], routed_experts=usual)
    if side == "rollout":
        return replace(rollout, logprobs=wrong, routed_experts=other), trainer
    return rollout, replace(trainer, logprobs=wrong, routed_experts=other)


def flipped_expert(world: World, sample: Drawn, pair: Pair, side: str) -> Pair:
    """Small differences flip the second expert of one token in sixteen."""
    usual = world.random.integers(0, 4, (len(sample.tokens), 2)).astype(np.uint16)
    usual[:, 1] += 4
    other = usual.copy()
    rows = world.random.choice(len(usual) - 1, len(usual) // 16, replace=False)
    other[rows, 1] = 8
    return _routes(world, sample, pair, side, usual, other)


def replayed_late(world: World, sample: Drawn, pair: Pair, side: str) -> Pair:
    """Routing replay is off by one row: each token is sent to the experts of the one before it."""
    usual = np.stack([world.random.permutation(8)[:2] for _ in sample.tokens]).astype(np.uint16)
    return _routes(world, sample, pair, side, usual, np.roll(usual, 1, axis=0))


def _turns_mask(pair: Pair) -> np.ndarray:
    """Two turns of the model with a tool's output between them."""
    mask = np.ones(len(pair[0].mask), np.bool_)
    mask[26:40] = False
    return mask


def mask_shifted(world: World, pair: Pair) -> Pair:
    """The completion mask of one side is that of the tokens, not that of the shifted labels."""
    mask = _turns_mask(pair)
    return replace(pair[0], mask=mask), replace(pair[1], mask=np.append(mask[1:], False))


def tool_counted(world: World, pair: Pair) -> Pair:
    """The trainer's loss counts the tool's output as the model's own."""
    return replace(pair[0], mask=_turns_mask(pair)), pair[1]


def mask_inverted(world: World, pair: Pair) -> Pair:
    """The trainer's mask is turned round: the tool's output is trained on and the model's own turns are not."""
    mask = _turns_mask(pair)
    return replace(pair[0], mask=mask), replace(pair[1], mask=~mask)


def _retokenised(pair: Pair, at: int, taken: int, given: list[int]) -> Pair:
    """The trainer has `given` for `taken` tokens at `at` of the response; a new token has the value −1."""
    rollout, trainer = pair
    place = trainer.prompt_len + at
    tokens = np.concatenate([rollout.tokens[:place], given, rollout.tokens[place + taken :]]).astype(np.uint32)
    new = np.full(len(given), -1.0, np.float32)
    changed: dict[str, Any] = {
        "tokens": tokens,
        "token_count": len(tokens),
        "tokens_digest": "",
        "logprobs": np.concatenate([trainer.logprobs[:at], new, trainer.logprobs[at + taken :]]),
        "mask": np.concatenate([trainer.mask[:at], np.ones(len(given), np.bool_), trainer.mask[at + taken :]]),
    }
    return rollout, replace(trainer, **changed)


def merged(world: World, pair: Pair) -> Pair:
    """A tool loop decodes what was sampled and tokenises it again: two tokens come back as one."""
    first = int(pair[0].tokens[pair[0].prompt_len + 21])
    return _retokenised(pair, 21, 2, [(first + 11) % 300])


def newline(world: World, pair: Pair) -> Pair:
    """The template puts a newline behind a turn's end that the engine never generated."""
    return _retokenised(pair, 33, 0, [198])
