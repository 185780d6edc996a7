"""Which keys a token sees: a window, a gap, a slice of its own, what comes after it.

A mask is a list of parts: rows first..last stand at the end of `keys`, causally. Every row is in one part, so that a
mask of any shape is the reference's own attention, a few times.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np

from auditor.causes.context.merged import merged
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import I64, Oracle
from auditor.causes.search import Candidate, Model, nearest, nearest_model
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import I32, Bits, Reference

Part = tuple[int, int, I64]  # first row, last row (exclusive), keys
Mask = Callable[[int], list[Part]]

_WINDOWS: Final = (4096, 2048, 1024, 512, 256, 128, 64, 48, 32, 24, 16, 8)
_CHUNKS: Final = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16)
_SINK: Final = 4
_SINKS: Final = (0, 1, 2, 4)
_SHORT: Final = 64  # tokens of a prompt in which windows of every size are tried
_FEW: Final = 4  # wrong rows on which windows are told apart
_CLOSEST: Final = 4
_PROMISING: Final = 0.7  # of the difference
_FEW_LAYERS: Final = 4
_BLOCKS: Final = (16, 32, 64, 128, 256)
_PADS: Final = 6  # ids that are tried as that of pads


def attention_mask(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Try what masks people get wrong, and whatever may be lost where the first value is wrong."""
    if best := nearest_model(evidence, oracle, _models(evidence, oracle)):
        yield best


def short_windows(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Windows shorter than the prompt, where nothing tells in which layers and heads they are."""
    if evidence.begins is None and (best := nearest(evidence, oracle, _closest_windows(evidence, oracle))):
        yield best


def _closest_windows(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    """Windows shorter than the prompt, in all layers or some: of the sizes that fit best on a few rows, with sinks."""
    rows = np.flatnonzero(evidence.differs[oracle.window] & np.isfinite(evidence.found[oracle.window]))[:_FEW]
    found, truth = (values[oracle.window][rows].astype(np.float64) for values in (evidence.found, evidence.truth))
    there = [(), *some_layers(oracle.decoder.config.layers)]
    sizes = range(2, oracle.prompt_len) if oracle.prompt_len <= _SHORT else _WINDOWS

    def under(kind: tuple[int, int, tuple[int, ...]]) -> Decoder:
        size, sink, layers = kind
        edit = Edit("attention", seeing(window(size, sink)))
        return edited(oracle.decoder, edit.at(*((layer, 0) for layer in layers)) if layers else edit)

    def error(kind: tuple[int, int, tuple[int, ...]]) -> float:
        return float(np.abs(oracle.logprobs_of_rows(under(kind), rows).astype(np.float64) - found).mean())

    kinds = sorted((error((size, 0, layers)), size, layers) for size in sizes for layers in there)[:_CLOSEST]
    tried = ((size - sink, sink, layers) for _, size, layers in kinds for sink in _SINKS if size - sink > 0)
    tried_too = ((size, sink, layers) for _, size, layers in kinds for sink in _SINKS[1:])
    before = float(np.abs(truth - found).mean())
    for kind in dict.fromkeys((*tried, *tried_too)):
        if error(kind) < _PROMISING * before:
            size, sink, layers = kind
            where = f", in layers {', '.join(map(str, layers))}," if layers else ""
            sinks = f" and the first {sink}" if sink else ""
            name = f"an attention in which{where} tokens see {size} back{sinks}"
            yield "attention_mask", name, oracle.logprobs(under(kind))


def seeing(mask: Mask) -> Callable[..., Any]:
    """Attention under a mask, as a change of the reference's."""

    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        out, m, l = np.empty_like(q), np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
        for first, last, keys in mask(len(q)):
            ends = np.array([0, last - first], np.int32), np.array([0, len(keys)], np.int32)
            rows = slice(first, last)
            out[rows], m[rows], l[rows] = plain.attention(q[rows].copy(), k[keys], v[keys], *ends)
        return out, m, l

    return attention


def window(size: int, sink: int = 0) -> Mask:
    """The last `size` keys, and the first few."""

    def parts(count: int) -> list[Part]:
        whole = min(size + sink, count)
        rows = [(0, whole, np.arange(whole))]
        return rows + [(i, i + 1, np.r_[0:sink, i + 1 - size : i + 1]) for i in range(whole, count)]

    return parts


def without(first: int, last: int) -> Mask:
    """No row from `last` on sees the keys first..last."""

    def parts(count: int) -> list[Part]:
        end = min(last, count)
        rows = [(0, end, np.arange(end)), (end, count, np.r_[0:first, end:count])]
        return [part for part in rows if part[0] < part[1]]

    return parts


def without_keys(hidden: I64) -> Mask:
    """No row sees those keys, not even its own; a row that would see none sees itself."""

    def parts(count: int) -> list[Part]:
        rows = []
        for i in range(count):
            keys = np.setdiff1d(np.arange(i + 1), hidden)
            rows.append((i, i + 1, keys if keys.size else np.array([i])))
        return rows

    return parts


def slices(edges: list[int]) -> Mask:
    """Every row sees its own slice only; edges: where slices begin, without 0."""

    def parts(count: int) -> list[Part]:
        starts = [0, *(edge for edge in edges if 0 < edge < count), count]
        return [(a, b, np.arange(a, b)) for a, b in pairwise(starts)]

    return parts


def of_ranks(edges: list[int]) -> Mask:
    """The first and the last slice are one rank's, the second and the last but one another's, and see no other's."""

    def parts(count: int) -> list[Part]:
        spans = list(pairwise(edges))
        keys = []
        for at, (first, last) in enumerate(spans):
            mate = spans[-1 - at]
            front = np.arange(*mate) if mate[0] < first else np.arange(0)
            keys.append((first, min(last, count), np.r_[front, first : min(last, count)]))
        return [part for part in keys if part[0] < count]

    return parts


def missing(edges: list[int], back: int) -> Mask:
    """No row sees the slice that is so many before its own, as where one step of a ring is lost."""

    def parts(count: int) -> list[Part]:
        spans, rows = list(pairwise(edges)), []
        for at, (first, last) in enumerate(spans):
            end, lost = min(last, count), spans[at - back] if at >= back else (0, 0)
            rows.append((first, end, np.r_[0 : lost[0], lost[1] : end]))
        return [part for part in rows if part[0] < count]

    return parts


def ahead(by: int) -> Mask:
    """Every row sees so many keys after its own; the last ones see all there are."""

    def parts(count: int) -> list[Part]:
        rows = [(0, count - by, np.arange(count))]
        return rows + [(i, i + 1, np.arange(count)) for i in range(count - by, count)]

    return parts


def behind(by: int) -> Mask:
    """No row sees itself and the by − 1 keys before it; the first ones see themselves."""

    def parts(count: int) -> list[Part]:
        return [*((i, i + 1, np.arange(i, i + 1)) for i in range(by)), (by, count, np.arange(count - by))]

    return parts


def whole(prompt: int) -> Mask:
    """Rows of the prompt see all of it."""

    def parts(count: int) -> list[Part]:
        end = min(prompt, count)
        rows = [(i, i + 1, np.arange(end)) for i in range(end)]
        return rows + ([(end, count, np.arange(count))] if end < count else [])

    return parts


def _models(evidence: Evidence, oracle: Oracle) -> Iterator[Model]:
    for cause, name, mask in _masks(evidence, oracle):
        edit = Edit("attention", seeing(mask))
        yield Model.of(oracle.decoder, cause, f"an attention in which {name}", edit)
        for layers in some_layers(oracle.decoder.config.layers) if "back" in name else ():
            there = edit.at(*((layer, 0) for layer in layers))
            said = f"an attention in which, in layers {', '.join(map(str, layers))}, {name}"
            yield Model(cause, said, edited(oracle.decoder, there))
    for name, attention in merged(len(evidence.rollout.tokens)):
        yield Model.of(
            oracle.decoder, "context_parallel", f"an attention in which {name}", Edit("attention", attention)
        )


def some_layers(count: int) -> list[tuple[int, ...]]:
    """Where models with two kinds of attention have the one that sees less."""
    single = [range(at, at + 1) for at in range(count)] if count <= _FEW_LAYERS else []
    tried = dict.fromkeys(tuple(layers) for layers in (*single, range(0, count, 2), range(1, count, 2)))
    return [layers for layers in tried if 0 < len(layers) < count]


def _masks(evidence: Evidence, oracle: Oracle) -> Iterator[tuple[str, str, Mask]]:
    prompt, total = oracle.prompt_len, len(oracle.tokens)
    yield "attention_mask", "every token sees the one after it", ahead(1)
    yield "attention_mask", "no token sees itself", behind(1)
    yield "attention_mask", "the prompt sees all of itself", whole(prompt)
    yield "attention_mask", "the response does not see the prompt", without(0, prompt)
    first = evidence.begins
    if first is not None:
        yield "attention_mask", f"tokens see {first} back", window(first)
        yield from _lost(oracle, first)
    yield from (("attention_mask", name, mask) for name, mask in of_pads(oracle, first))
    for size in _WINDOWS:
        if size < total:
            yield "attention_mask", f"tokens see {size} back", window(size)
    for size in _WINDOWS:
        if size + _SINK < total:
            yield "attention_mask", f"tokens see {size} back and the first {_SINK}", window(size, _SINK)
    yield from _of_slices(len(evidence.rollout.tokens))
    for size in _CHUNKS:
        if size < total:
            name = f"each chunk of {size} tokens sees itself only"
            yield "kv_boundary", name, slices(list(range(size, total, size)))


def of_pads(oracle: Oracle, first: int | None) -> Iterator[tuple[str, Mask]]:
    """What is not seen where an id is taken for that of pads. first: the first wrong row, or None."""
    for pad in _pads(oracle, first):
        name = f"nothing sees tokens of id {pad}, as where that is taken for a pad's"
        yield name, without_keys(np.flatnonzero(oracle.tokens == pad))


def _pads(oracle: Oracle, first: int | None) -> list[int]:
    """Ids whose keys may be hidden: that of the first wrong row, or the commonest where the first value is wrong."""
    if first is not None:
        return [int(oracle.tokens[first])]
    ids, times = np.unique(oracle.tokens[: oracle.prompt_len], return_counts=True)
    return [int(pad) for pad in ids[np.argsort(-times, kind="stable")][:_PADS]]


def _of_slices(length: int) -> Iterator[tuple[str, str, Mask]]:
    """What context parallelism loses of a sequence of that length."""
    # Chunks of a cache would come to an end with the sequence by chance only, so slices are said first.
    for parts in (2, 4, 8, 6, 3):
        # A trainer whose labels are its inputs, shifted, has a row less than there are tokens to cut.
        shifted, edges = ([round(i * rows / parts) for i in range(1, parts)] for rows in (length - 1, length))
        yield "context_parallel", f"each of {parts} slices sees itself only", slices(edges)
        if shifted != edges:
            name = f"each of {parts} slices of {length - 1} tokens sees itself only"
            yield "context_parallel", name, slices(shifted)
        if parts % 2 == 0 and parts > 2:
            name = f"each of {parts // 2} ranks sees its own two of {parts} slices only"
            yield "context_parallel", name, of_ranks([0, *edges, length])
        if parts > 2:
            for back in range(1, parts - 1):
                name = f"slices of {parts} do not see the one {back} before"
                yield "context_parallel", name, missing([0, *edges, length], back)


def _lost(oracle: Oracle, first: int) -> Iterator[tuple[str, str, Mask]]:
    """Keys that are gone from the first wrong row on."""
    for start in dict.fromkeys((0, oracle.prompt_len, first - 1, *(first - block for block in _BLOCKS))):
        if 0 <= start < first:
            yield (
                "kv_boundary",
                f"from token {first} on nothing sees tokens {start} to {first - 1}",
                without(start, first),
            )
