"""Slots of the cache that hold, or show, something else: whose, and which slots, for which rows, in which heads."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Final

import numpy as np

from auditor.causes.context.kv import stale_in_part
from auditor.causes.context.slots import Kv, Place, Slots, Tenant, asked, cached, in_place, pointing
from auditor.causes.evidence import SETTLED, Evidence, Suggestion
from auditor.causes.oracle import I64, Oracle, VersionUnavailable
from auditor.causes.search import nearest
from rl_kernel.reference.ops import Bits

_FEW: Final = 2  # rows whose bits tell
_EDGES: Final = 32
_TRIED: Final = 24
_LIKELIEST: Final = 2  # that are said although no bits are theirs
_WORKED_ON: Final = 3  # kinds of them
_BESIDE: Final = 2  # tokens
_GAINED: Final = 6.0  # as a logarithm: how much likelier than no change at all
_SURELY: Final = 15.0  # the same, where no bits say so
_MUCH: Final = 0.5  # of the square of a difference
_PERHAPS: Final = 0.5  # as a logarithm; what tokens in front make, hardly anything else tells
_CLEARLY: Final = 1.2  # the same, of weights, which much else tells
_LOOKS_SO: Final = 0.43  # more than a trend
_VERSIONS: Final = 3
_SHIFTS: Final = (1, -1, 16, -16, 8, -8, 32, -32, 4, -4)


def other_tenants(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Keys and values of a span of tokens that are an older version's, another slot's, nothing's, or not seen."""
    window = oracle.window
    rows, response = asked(evidence, oracle)
    if response is None:
        yield from stale_in_part(evidence, oracle)
        return
    found, truth = (values[window][rows] for values in (evidence.found, evidence.truth))
    edges, readers = _edges(evidence, oracle)
    slots = Slots(oracle, response, found.astype(np.float64) - truth, edges, readers)
    places = [place for tenant in _tenants(evidence, oracle) for place in slots.places(tenant)]
    places.sort(key=lambda place: place.unlikely)
    likely = [place for place in places[:_TRIED] if slots.nothing - place.unlikely > _GAINED]
    tried = [*likely, *_around(likely, readers)]
    exact = list(islice((place for place in tried if _is_exact(evidence, oracle, place, rows)), 1))
    named = exact or likely[:_LIKELIEST]
    said = ((place.tenant.cause, _said(place), oracle.logprobs(in_place(oracle.decoder, place))) for place in named)
    best = nearest(evidence, oracle, said)
    if best is not None:
        yield best
    if likely and (best is None or best.score < SETTLED):
        first = likely[0]
        if first.share > _MUCH and slots.nothing - first.unlikely > _SURELY:
            yield pointing(first, len(rows))
    if evidence.begins is None and not slots.hidden and (best is None or best.score < SETTLED):
        yield from _whereabouts(slots.in_front())


def _whereabouts(in_front: float) -> Iterator[Suggestion]:
    """Whether what is wrong, and nothing fits, stands in the prompt or everywhere."""
    much = f"{np.exp(abs(in_front)):.3g} times likelier"
    if in_front > _PERHAPS:
        said = (
            f"rows differ as they look back at the prompt: that something else stands there is {much} than everywhere"
        )
        yield Suggestion("other_context", _LOOKS_SO, said)
    if in_front < -_CLEARLY:
        said = f"rows differ whether they look back at the prompt or not: that all is wrong is {much} than the prompt"
        yield Suggestion("other_weights", _LOOKS_SO, said)


def _around(likely: Sequence[Place], readers: I64) -> Iterator[Place]:
    """Spans that begin and end a little beside the likeliest, which neighbours' effects can hardly be told from."""
    kinds = {(place.tenant.name, place.kind, place.where): place for place in reversed(likely)}
    near = [by for by in product(range(-_BESIDE, _BESIDE + 1), repeat=2) if abs(by[0]) + abs(by[1]) <= _BESIDE]
    for place in sorted(kinds.values(), key=lambda place: place.unlikely)[:_WORKED_ON]:
        for (a, b), since in product(near, readers.tolist()):
            if 0 <= place.first + a < place.last + b:
                yield replace(place, first=place.first + a, last=place.last + b, since=since)


def _said(place: Place) -> str:
    return f"an attention with {place.name}" if place.tenant.of is not None else f"an attention in which {place.name}"


def _is_exact(evidence: Evidence, oracle: Oracle, place: Place, rows: I64) -> bool:
    few = rows[:_FEW]
    values = oracle.logprobs_of_rows(in_place(oracle.decoder, place), few)
    return values.tobytes() == evidence.found[oracle.window][few].tobytes()


def _edges(evidence: Evidence, oracle: Oracle) -> tuple[I64, I64]:
    """Where spans may begin and end, and rows from which on they may be read."""
    prompt, begins = oracle.prompt_len, evidence.begins
    last = prompt if begins is None else min(len(oracle.tokens), begins + _EDGES)
    step = max(1, -(-last // _EDGES))
    size = next((size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size >= step), step)
    marks = {0, last, *range(0, last, size), prompt - 1, prompt, *((begins, begins + 1) if begins is not None else ())}
    readers = {0, prompt, *(() if begins is None else (begins,))}
    return np.array(sorted(mark for mark in marks if mark <= last)), np.array(sorted(readers))


def _tenants(evidence: Evidence, oracle: Oracle) -> Iterator[Tenant]:
    stated = evidence.record.weight_version
    older = sorted((version for version in oracle.versions if version < stated), reverse=True)
    for version in dict.fromkeys([*older[:_VERSIONS], *older[-1:]]):
        try:
            done = oracle.once(version)
            layers = [(k, v) for _, k, v in done.layers or cached(oracle, done.decoder)]
        except VersionUnavailable:
            continue
        yield Tenant("stale_kv", f"{{}} of weight version {version}", partial(_of_layers, layers))
    yield Tenant("attention_mask", "nothing sees {}", None)
    yield Tenant("kv_boundary", "{} are there twice", None, 1.0, times=2)
    yield Tenant("kv_boundary", "{} set to zero", lambda layer, k, v: (0 * k, 0 * v))
    for by in _SHIFTS:
        which = f"{abs(by)} slot{'s' if abs(by) > 1 else ''} {'behind' if by > 0 else 'before'}"
        yield Tenant("kv_boundary", f"{{}} that are those {which}", partial(_shifted, by), 1.0)


def _of_layers(layers: Sequence[Kv], layer: int, k: Bits, v: Bits) -> Kv:
    return layers[layer]


def _shifted(by: int, layer: int, k: Bits, v: Bits) -> Kv:
    order = np.clip(np.arange(len(k)) + by, 0, len(k) - 1)
    return k[order], v[order]
