"""Keys and values that do not belong to these weights, or to these tokens.

A prefix cache, a paged block or an update of the weights in the middle of a generation leaves keys and values of older
weights behind: what the response sees of its prefix is then not what its own weights would have computed. A block
table that is wrong by one shows another block's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any, Final

import numpy as np

from auditor.causes.context.seen import some_layers
from auditor.causes.context.slots import cached
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import CERTAIN, Evidence, Suggestion
from auditor.causes.oracle import I64, Oracle, VersionUnavailable
from auditor.causes.search import Candidate, Model, nearest, nearest_model, promising_of
from auditor.compare import Logprobs
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import I32, Bits, Reference

Kv = tuple[Bits, Bits]

_SIZES: Final = (16, 32, 64, 8)
_MOST_BLOCKS: Final = 8
_VERSIONS_TRIED: Final = 3
_LARGER: Final = 3.0
_TOGETHER: Final = 6  # caches that are tried at once
_SAID_BEFORE: Final = 2  # values of an older version that are none by chance


def stale_kv(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Keys and values of an older version up to some token, the named weights after it."""
    best = nearest(evidence, oracle, _of_older_versions(evidence, oracle, in_part=False))
    if best is None or best.score < CERTAIN:
        both = nearest(evidence, oracle, _of_two_ages(evidence, oracle))
        best = both if both and (best is None or both.score > best.score) else best
    if best is not None:
        yield best


def stale_in_part(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Keys or values of one older block, or in some layers, where nothing tells which."""
    if best := nearest(evidence, oracle, _of_older_versions(evidence, oracle, in_part=True)):
        yield best


def _of_older_versions(evidence: Evidence, oracle: Oracle, in_part: bool) -> Iterator[Candidate]:
    stated = evidence.record.weight_version
    older = sorted((version for version in oracle.versions if version < stated), reverse=True)
    for version in dict.fromkeys([*older[:_VERSIONS_TRIED], *older[-1:]]):
        try:
            layers, old = _record(oracle, version), oracle.logprobs_of(version)
        except VersionUnavailable:
            continue
        if _beyond(evidence, oracle, old):
            continue
        caches = [
            _Cache(
                f"{what} of tokens {first} to {last - 1} of weight version {version}",
                _with_keys(oracle.decoder, layers, slice(first, last), kinds, there),
                0 if first else last,
            )
            for first, last in _spans(evidence, oracle, old, in_part)
            for what, kinds, there in islice(_which(len(layers)), None if in_part else 1)
        ]
        yield from _fitting(evidence, oracle, old, caches)


@dataclass(frozen=True, slots=True)
class _Cache:
    """A decoder that reads older keys and values. until: values in front of it may have been said by the old one."""

    name: str
    decoder: Decoder
    until: int


def _fitting(evidence: Evidence, oracle: Oracle, old: Logprobs, caches: Sequence[_Cache]) -> Iterator[Candidate]:
    """The values of those caches that a few rows, which are computed together, do not rule out."""
    every = np.arange(len(oracle.rows))
    for at in range(0, len(caches), _TOGETHER):
        some = caches[at : at + _TOGETHER]

        def values(rows: I64, some: Sequence[_Cache] = some) -> list[Logprobs]:
            new = oracle.of_each([cache.decoder for cache in some], rows)
            return [_mended(evidence, oracle, v, old, c.until, rows) for c, v in zip(some, new, strict=True)]

        for cache, promises in zip(some, promising_of(evidence, oracle, len(some), values), strict=True):
            if promises:
                new = oracle.logprobs(cache.decoder)
                yield "stale_kv", cache.name, _mended(evidence, oracle, new, old, cache.until, every)


def _beyond(evidence: Evidence, oracle: Oracle, old: Logprobs) -> bool:
    """Whether the difference is far larger than a whole version makes: what its keys and values alone do not."""
    truth, delta = evidence.truth[oracle.window].astype(np.float64), evidence.delta[oracle.window]
    return float(np.abs(delta).mean()) > _LARGER * float(np.abs(old - truth).mean())


def _of_two_ages(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    """A prompt whose first blocks one older version cached, and a later one the rest, upon them or by itself."""
    stated = evidence.record.weight_version
    older = sorted((version for version in oracle.versions if version < stated), reverse=True)[:_VERSIONS_TRIED]
    prompt = oracle.prompt_len
    for newer, oldest in combinations(older, 2):
        try:
            first, then, old = _record(oracle, oldest), _record(oracle, newer), oracle.logprobs_of(newer)
        except VersionUnavailable:
            continue
        if _beyond(evidence, oracle, old):
            continue
        caches = [
            _Cache(
                f"keys and values of tokens 0 to {cut - 1} of weight version {oldest}, and of version {newer} up to"
                f" {end - 1}, {said}",
                _with_keys(oracle.decoder, layers, slice(0, end), (0, 1), range(len(layers))),
                end,
            )
            for cut in sorted({size * (prompt // 2 // size or 1) for size in _SIZES if size < prompt})
            for said, layers in (
                ("upon them", _upon(oracle, newer, first, cut)),
                ("by itself", _joined(first, then, cut)),
            )
            for end in dict.fromkeys((prompt, prompt - 1))
        ]
        yield from _fitting(evidence, oracle, old, caches)


def _joined(front: Sequence[Kv], back: Sequence[Kv], cut: int) -> list[Kv]:
    return [
        (np.concatenate([a[:cut], c[cut:]]), np.concatenate([b[:cut], d[cut:]]))
        for (a, b), (c, d) in zip(front, back, strict=True)
    ]


def _mended(evidence: Evidence, oracle: Oracle, new: Logprobs, old: Logprobs, old_until: int, rows: I64) -> Logprobs:
    """Of some rows; what stands in the prefix may have been said before the new weights came, or after."""
    was_old = (oracle.rows[rows] < old_until) & (evidence.found[oracle.window][rows] == old[rows])
    return np.where(was_old, old[rows], new).astype(np.float32)


def lost_blocks(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """A block of keys and values that holds nothing, or what a neighbouring block holds."""
    if best := nearest_model(evidence, oracle, _wrong_blocks(evidence, oracle)):
        yield best


def _wrong_blocks(evidence: Evidence, oracle: Oracle) -> Iterator[Model]:
    for first, last in _blocks(evidence, oracle):
        for name, source in _sources(first, last):
            edit = Edit("attention", _replaced(first, source))
            said = f"keys and values of tokens {first} to {first + len(source) - 1} {name}"
            yield Model.of(oracle.decoder, "kv_boundary", said, edit)


def _sources(first: int, last: int) -> Iterator[tuple[str, I64]]:
    """What stands in a block's place, and the slots of it that do; -1 is nothing."""
    here, size = np.arange(first, last), last - first
    yield "set to zero", np.full(size, -1)
    if first >= size:
        yield "that are those of the block before", here - size
    yield "that are those of the block after", here + size
    for by in (-1, 1):
        yield f"that are those {abs(by)} token {'before' if by < 0 else 'after'}", np.maximum(here + by, 0)
    yield "that are in each other's place, half by half", np.append(here + size, here)


def _replaced(first: int, source: I64) -> Callable[..., Any]:
    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        taken = np.minimum(source[: len(k) - first], len(k) - 1)
        new_k, new_v = k.copy(), v.copy()
        for new, cache in ((new_k, k), (new_v, v)):
            new[first : first + len(taken)] = np.where(taken[:, None, None] < 0, 0, cache[taken])
        return plain.attention(q, new_k, new_v, cu_q, cu_k)

    return attention


def _blocks(evidence: Evidence, oracle: Oracle) -> Iterator[tuple[int, int]]:
    """Where the first value goes wrong; else the blocks of the prompt."""
    begins = evidence.begins
    if begins is not None:
        for size in _SIZES:
            for start in dict.fromkeys((begins, begins + 1, begins - size, begins + 1 - size)):
                if start >= 0:
                    yield start, start + size
        return
    for size in _SIZES[:1] if oracle.prompt_len >= 4 * _SIZES[0] else (*_SIZES[:1], *_SIZES[3:]):
        for start in range(0, min(oracle.prompt_len, _MOST_BLOCKS * size), size):
            yield start, start + size


def _record(oracle: Oracle, version: int) -> list[Kv]:
    """Keys and values of the whole window under another version."""
    done = oracle.once(version)
    return [(k, v) for _, k, v in done.layers or cached(oracle, done.decoder)]


def _upon(oracle: Oracle, version: int, older: Sequence[Kv], cut: int) -> list[Kv]:
    """Keys and values under a version of a sequence of which an older one cached those of tokens 0..cut."""
    layers: list[Kv] = []

    def keep(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        own = k.copy(), v.copy()
        own[0][:cut], own[1][:cut] = (kind[:cut] for kind in older[len(layers)])
        layers.append(own)
        return plain.attention(q, *own, cu_q, cu_k)

    oracle.hidden(edited(oracle.once(version).decoder, Edit("attention", keep)), oracle.tokens[: oracle.prompt_len])
    return layers


def _which(layers: int) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
    """What is foreign: both in all layers, one of them, both in some layers."""
    for what, kinds in (("keys and values", (0, 1)), ("keys", (0,)), ("values", (1,))):
        yield what, kinds, range(layers)
    for some in some_layers(layers):
        yield f"keys and values in layers {', '.join(map(str, some))}", (0, 1), some


def _with_keys(
    decoder: Decoder, layers: Sequence[Kv], where: slice, kinds: Sequence[int], there: Sequence[int]
) -> Decoder:
    """The decoder with the given keys (0) or values (1) of some tokens, in some layers."""

    def of_layer(foreign: Kv) -> Callable[..., Any]:
        def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
            caches = k.copy(), v.copy()
            for kind in kinds:
                caches[kind][where] = foreign[kind][where][: len(k[where])]
            return plain.attention(q, *caches, cu_q, cu_k)

        return attention

    return edited(decoder, *(Edit("attention", of_layer(layers[at])).at((at, 0)) for at in there))


def _spans(evidence: Evidence, oracle: Oracle, old: Logprobs, blocks: bool) -> Iterator[tuple[int, int]]:
    """Where a stale prefix may end: the prompt, its last whole block, or the first token that is not the old one's.

    blocks: or one stale block of the prompt.
    """
    prompt = oracle.prompt_len
    ends = [prompt - 1, prompt, *((prompt - 1) // block * block for block in (16, 64))]
    new = np.flatnonzero(evidence.found[oracle.window].view(np.uint32) != old.view(np.uint32))
    if new.size and new[0] > 0:
        ends.insert(0 if new[0] > _SAID_BEFORE else len(ends), int(oracle.rows[new[0]]))
    yield from ((0, end) for end in dict.fromkeys(ends) if 0 < end < len(oracle.tokens))
    yield from ((first, last) for first, last in _blocks(evidence, oracle) if blocks and first > 0)
