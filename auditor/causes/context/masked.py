"""Masks that hold in some heads of some layers only: in one kind of a model's layers, on one rank.

What a mask does to each layer's attention is computed in fp32, and what that does to the values is known to the first
order; the likeliest are then tried in the contract's arithmetic.

B rows that are asked for, T tokens, L layers, H query heads, G key heads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, Final

import numpy as np

from auditor.causes.context.seen import Mask, ahead, behind, of_pads, seeing, short_windows, slices, whole, window
from auditor.causes.context.slots import asked, cached, scopes, whitening
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import F32, F64, I64, Oracle
from auditor.causes.search import nearest
from auditor.causes.weights.response import Response
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import I32, Bits, Reference, widen

_FEW: Final = 2  # rows whose bits tell
_TRIED: Final = 16
_WORKED_ON: Final = 1
_BESIDE: Final = 4
_ATTENTION: Final = 0.1  # of a forward
_GAINED: Final = 6.0  # as a logarithm: how much likelier than no change at all
_SIZES: Final = (*range(2, 65), 96, 128, 256, 512, 1024, 2048, 4096)
_SINKS: Final = (1, 2, 4)
_MOST: Final = 1 << 26  # values of all heads' scores


@dataclass(frozen=True, slots=True)
class _Guess:
    """A mask in some heads: [L,G]. unlikely: the lower, the earlier it is tried."""

    name: str
    mask: Mask
    heads: Any
    unlikely: float


def masked_in_part(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """A window, slices or anything else that rows do not see, in some layers or on one rank."""
    rows, response = asked(evidence, oracle)
    config, count = oracle.decoder.config, len(oracle.tokens)
    if response is None or config.layers * config.heads * count * count > _MOST:
        yield from short_windows(evidence, oracle)
        return
    found, truth = (values[oracle.window][rows] for values in (evidence.found, evidence.truth))
    guesses = sorted(_guesses(oracle, response, found.astype(np.float64) - truth), key=lambda guess: guess.unlikely)
    tried = (*guesses[:_TRIED], *_around(guesses))
    exact = list(islice((guess for guess in tried if _is_exact(oracle, guess, rows, found)), 1))
    said = (("attention_mask", g.name, oracle.logprobs(_decoder(oracle, g))) for g in exact or guesses[:1])
    if best := nearest(evidence, oracle, said):
        yield best


def _is_exact(oracle: Oracle, guess: _Guess, rows: I64, found: F32) -> bool:
    few = oracle.logprobs_of_rows(_decoder(oracle, guess), rows[:_FEW])
    return few.tobytes() == found[:_FEW].tobytes()


def _guesses(oracle: Oracle, response: Response, delta: F64) -> Iterator[_Guess]:
    whiten = whitening(response, delta, np.arange(len(delta)))
    difference = whiten @ delta
    nothing = 0.5 * len(delta) * float(np.log(difference @ difference))
    names, masks = zip(*_masks(oracle), strict=True)
    oracle.spend(_ATTENTION * len(names))
    layers = zip(reversed(response.of_attention), cached(oracle, oracle.decoder), strict=True)
    effects = np.stack([_of_layer(signal, kept, masks, whiten) for signal, kept in layers], axis=1)  # [masks,L,G,B]
    for name, mask, each in zip(names, masks, effects, strict=True):
        for where, heads in scopes(*each.shape[:2]):
            left = difference - each[heads].sum(axis=0)
            unlikely = 2.0 * bool(where) + 0.5 * len(left) * float(np.log(left @ left + 1e-9))
            if nothing - unlikely > _GAINED:
                yield _Guess(f"an attention in which{where and f',{where},'} {name}", mask, heads, unlikely)


def _of_layer(signal: F32, kept: tuple[Bits, Bits, Bits], masks: tuple[Mask, ...], whiten: F64) -> F64:
    """[masks,G,B], in roundings."""
    count, groups = signal.shape[1], kept[1].shape[1]
    q, k, v = (widen(a[:count]).transpose(1, 0, 2) for a in kept)
    k, v = (np.repeat(a, len(q) // groups, axis=0) for a in (k, v))
    scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(q.shape[2]))
    chances = np.exp(scores - scores.max(axis=2, keepdims=True))
    causal = np.tri(count, dtype=np.float32)
    own = _normed(chances * causal) @ v
    by_head = signal.reshape(len(signal), count, len(q), -1)
    effects = []
    for mask in masks:
        moved = (_normed(chances * _matrix(mask, count)) @ v - own).transpose(1, 0, 2)
        each = [
            np.tensordot(by_head[:, :, mine], moved[:, mine], axes=3)
            for mine in np.split(np.arange(len(q)), groups)
        ]  # fmt: skip
        effects.append(np.stack(each))
    found: F64 = np.stack(effects) @ whiten.T
    return found


def _normed(chances: F32) -> F32:
    result: F32 = chances / np.maximum(chances.sum(axis=2, keepdims=True), np.float32(1e-30))
    return result


def _matrix(mask: Mask, count: int) -> F32:
    """1 where a row sees a key, [T,T]; the rows of a part stand at the end of its keys."""
    seen = np.zeros((count, count), np.float32)
    for first, last, keys in mask(count):
        part = np.tri(last - first, len(keys), len(keys) - (last - first), dtype=np.float32)
        seen[first:last, keys] = part
    return seen


def _masks(oracle: Oracle) -> Iterator[tuple[str, Mask]]:
    prompt, total = oracle.prompt_len, len(oracle.tokens)
    for size in _SIZES:
        if size < total:
            yield _window(size, 0)
        if size % 8 == 0 and size < total:
            yield _window(size, _SINKS[-1])
            yield f"each chunk of {size} tokens sees itself only", slices(list(range(size, total, size)))
    yield "every token sees the one after it", ahead(1)
    yield "no token sees itself", behind(1)
    yield "the prompt sees all of itself", whole(prompt)
    for parts in (2, 3, 4, 6, 8):
        edges = [round(i * total / parts) for i in range(1, parts)]
        yield f"each of {parts} slices sees itself only", slices(edges)
    yield from of_pads(oracle, None)


def _window(size: int, sink: int) -> tuple[str, Mask]:
    return f"tokens see {size} back" + f" and the first {sink}" * (sink > 0), window(size, sink)


def _around(guesses: list[_Guess]) -> Iterator[_Guess]:
    """Windows a little larger or smaller than the likeliest, and the first tokens with them."""
    for guess in [guess for guess in guesses if " back" in guess.name][:_WORKED_ON]:
        place, _, found = guess.name.partition("tokens see ")
        size = int(found.split()[0])
        for by, sink in sorted(product(range(-_BESIDE, _BESIDE + 1), (0, *_SINKS)), key=lambda pair: abs(pair[0])):
            if size + by > 0:
                name, mask = _window(size + by, sink)
                yield replace(guess, name=place + name, mask=mask)


def _decoder(oracle: Oracle, guess: _Guess) -> Decoder:
    edits = [
        Edit("attention", _in_heads(seeing(guess.mask), heads)).at((layer, 0))
        for layer, heads in enumerate(guess.heads)
        if heads.any()
    ]
    return edited(oracle.decoder, *edits)


def _in_heads(change: Callable[..., Any], heads: Any) -> Callable[..., Any]:
    """The change in some key heads and in the query heads that read them."""

    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        own, other = plain.attention(q, k, v, cu_q, cu_k), change(plain, q, k, v, cu_q, cu_k)
        mine = np.repeat(heads, q.shape[1] // k.shape[1])
        parts: Any = zip(own, other, strict=True)
        for part, changed in parts:
            part[:, mine] = changed[:, mine]
        return own

    return attention
