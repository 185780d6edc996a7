"""Slots of the cache that hold, or show, something else: whose, and which slots, for which rows, in which heads."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import I64, Oracle, VersionUnavailable
from auditor.causes.response import response_of, rows_of
from auditor.causes.search import nearest
from auditor.causes.slots import Kv, Place, Slots, Tenant, cached, in_place

_ROWS: Final = 72
_FEW: Final = 2  # rows whose bits tell
_EDGES: Final = 32
_TRIED: Final = 24
_LIKELIEST: Final = 2  # that are said although no bits are theirs
_GAINED: Final = 6.0  # as a logarithm: how much likelier than no change at all
_VERSIONS: Final = 3
_SHIFTS: Final = (1, -1, 16, -16, 8, -8, 32, -32, 4, -4)


def other_tenants(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Keys and values of a span of tokens that are an older version's, another slot's, nothing's, or not seen."""
    window = oracle.window
    wrong = np.flatnonzero(evidence.differs[window] & np.isfinite(evidence.found[window]))[:_ROWS]
    rows = rows_of(oracle, wrong)
    response = response_of(oracle, rows)
    if response is None or not response.of_attention:
        return
    found, truth = (values[window][rows] for values in (evidence.found, evidence.truth))
    slots = Slots(oracle, response, found.astype(np.float64) - truth, *_edges(evidence, oracle))
    places = [place for tenant in _tenants(evidence, oracle, slots) for place in slots.places(tenant)]
    places.sort(key=lambda place: place.unlikely)
    likely = [place for place in places[:_TRIED] if slots.nothing - place.unlikely > _GAINED]
    exact = [place for place in likely if _is_exact(evidence, oracle, place, rows)][:1]
    tried = exact or likely[:_LIKELIEST]
    said = ((place.tenant.cause, _said(place), oracle.logprobs(in_place(oracle.decoder, place))) for place in tried)
    if best := nearest(evidence, oracle, said):
        yield best


def _said(place: Place) -> str:
    return (
        f"an attention with {place.name}" if place.tenant.layers is not None else f"an attention in which {place.name}"
    )


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


def _tenants(evidence: Evidence, oracle: Oracle, slots: Slots) -> Iterator[Tenant]:
    own: list[Kv] = [(k, v) for _, k, v in slots.kept]
    stated = evidence.record.weight_version
    older = sorted((version for version in oracle.versions if version < stated), reverse=True)
    for version in dict.fromkeys([*older[:_VERSIONS], *older[-1:]]):
        try:
            layers = [(k, v) for _, k, v in cached(oracle, oracle.version(version))]
        except VersionUnavailable:
            continue
        yield Tenant("stale_kv", f"{{}} of weight version {version}", layers)
    yield Tenant("attention_mask", "nothing sees {}", None, 0.0)
    yield Tenant("kv_boundary", "{} set to zero", [(0 * k, 0 * v) for k, v in own])
    count = len(own[0][0])
    at = np.arange(count)
    for by in _SHIFTS:
        order = np.clip(at + by, 0, count - 1)
        which = f"{abs(by)} slot{'s' if abs(by) > 1 else ''} {'behind' if by > 0 else 'before'}"
        yield Tenant("kv_boundary", f"{{}} that are those {which}", [(k[order], v[order]) for k, v in own], 1.0)
