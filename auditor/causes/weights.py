"""Other weights than the record names: stale by some versions, never delivered, or delivered in part."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.mixture import Mixture
from auditor.causes.oracle import Oracle, VersionUnavailable
from auditor.causes.search import Candidate, cosine, nearest

_TRIED: Final = 12
_ROWS: Final = 48  # wrong rows on which versions and their parts are told apart
_LARGER: Final = 4.0  # times the effect of all of a version: what no part of it makes


def stale_weights(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The weight version under which the reference gives what the side reports; the nearest ones are tried first."""
    if best := nearest(evidence, oracle, _versions(evidence, oracle)):
        yield best


def _versions(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    stated = evidence.record.weight_version
    others = [version for version in oracle.versions if version != stated]
    near = sorted(others, key=lambda version: (abs(version - stated), version > stated))[:_TRIED]
    first = min(oracle.versions, default=stated)
    for version in dict.fromkeys([*near[:4], *([first] if first != stated else []), *near[4:]]):
        try:
            decoder = oracle.version(version)
        except VersionUnavailable:
            continue
        which = f"weight version {version}{', the first one,' if version == first else ''}"
        away = f"{abs(stated - version)} {'behind' if version < stated else 'ahead'}"
        name = f"{which} where {stated} is stated, {away}"
        yield _cause(version, first, stated), name, oracle.logprobs(decoder)


def _cause(version: int, first: int, stated: int) -> str:
    return "weights_never_delivered" if version == first and stated - version > 1 else "stale_weights"


def mixed_weights(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Some tensors, or one rank's part of all, of another version; or another share of what came since."""
    if best := nearest(evidence, oracle, _mixtures(evidence, oracle)):
        yield best


def _mixtures(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    window, stated = oracle.window, evidence.record.weight_version
    rows = np.flatnonzero(evidence.differs[window] & np.isfinite(evidence.found[window]))[:_ROWS]
    if rows.size < 2 or evidence.begins is not None:
        return  # no tensor is right up to some token
    delta = evidence.found[window][rows].astype(np.float64) - evidence.truth[window][rows]
    first = min(oracle.versions, default=stated)
    for version in _related(evidence, oracle, rows, delta):
        cause = _cause(version, first, stated)
        mixture = Mixture(
            oracle, oracle.version(version), rows, evidence.found[window][rows], evidence.truth[window][rows]
        )
        for name, decoder in mixture.parts(delta):
            yield cause, f"version {stated} with {name} of version {version}", oracle.logprobs(decoder)
        for name, decoder in mixture.shares(delta):
            yield "adapter_scale", f"version {version} with {name}", oracle.logprobs(decoder)


def _related(evidence: Evidence, oracle: Oracle, rows: np.ndarray, delta: np.ndarray) -> list[int]:
    """The version before, the first, and whichever points most where the difference does.

    None of which all has an effect far below the difference.
    """
    stated, truth = evidence.record.weight_version, evidence.truth[oracle.window][rows]
    before = [version for version in sorted(oracle.versions, reverse=True) if version < stated]
    after = [version for version in sorted(oracle.versions) if version > stated]
    effects: dict[int, np.ndarray] = {}
    for version in dict.fromkeys([*before[:3], *before[-1:], *after[:1]]):
        try:
            effect = oracle.logprobs_of_rows(oracle.version(version), rows).astype(np.float64) - truth
        except VersionUnavailable:
            continue
        if 0 < np.abs(delta).mean() < _LARGER * np.abs(effect).mean():
            effects[version] = effect
    likest = sorted(effects, key=lambda version: -abs(cosine(effects[version], delta)))[:2]
    return list(dict.fromkeys(version for version in (*before[:1], *before[-1:], *likest) if version in effects))
