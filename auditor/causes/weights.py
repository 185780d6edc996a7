"""Other weights than the record names: stale by some versions, or never delivered at all."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from auditor.causes.evidence import (
    CERTAIN,
    IN_PART,
    Evidence,
    Suggestion,
    bits_hit,
    correlation,
    explained,
    worth_saying,
)
from auditor.causes.oracle import Oracle, VersionUnavailable
from auditor.causes.other_models import nearest_model
from auditor.compare import Logprobs, Mask
from rl_kernel.reference.model import Decoder

_TRIED = 12
_PIECES = 8  # stretches of one version each; more is no order of updates
_MORE_THAN_ROUNDING = 0.05
_FALLBACK = 0.4  # nothing was computed, and much else looks like it


def other_weights(evidence: Evidence) -> Iterator[Suggestion]:
    """Large differences everywhere, of both signs, on values that still resemble the reference's: another model."""
    delta = evidence.delta[evidence.active]
    differing = delta[delta != 0.0]
    if differing.size < max(4, 0.9 * delta.size) or np.median(np.abs(differing)) < _MORE_THAN_ROUNDING:
        return
    alike = correlation(evidence.found, evidence.truth)
    # Other weights make what was drawn less likely; a filter or a lower temperature makes it likelier.
    if (differing < 0).mean() > 0.3:
        yield Suggestion(
            "other_weights",
            _FALLBACK,
            f"{differing.size} of {delta.size} tokens differ, by {np.median(np.abs(differing)):.3g} in the median,"
            f" correlation with the reference {alike:.3f}: as with weights of which no version is known",
        )


def stale_weights(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The weight version under which the reference gives what the side reports; the nearest ones are tried first."""
    stated = evidence.record.weight_version
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    best: tuple[float, int, str] | None = None
    said: dict[int, Logprobs] = {stated: truth}
    others = [version for version in oracle.versions if version != stated]
    nearest = sorted(others, key=lambda version: (abs(version - stated), version > stated))[:_TRIED]
    first = min(oracle.versions, default=stated)
    for version in dict.fromkeys([*nearest[:4], *([first] if first != stated else []), *nearest[4:]]):
        try:
            predicted = oracle.logprobs(oracle.version(version))
        except VersionUnavailable:
            continue
        said[version] = predicted
        score = explained(found, truth, predicted, active)
        if worth_saying(score) and (best is None or score > best[0]):
            best = (score, version, bits_hit(found, predicted, active))
            if score >= CERTAIN:
                break
    if (best is None or best[0] < IN_PART) and (pieces := _in_pieces(found, said, active)):
        yield Suggestion(
            "stale_weights", CERTAIN, f"the values are those of several versions, {pieces}; {stated} is stated"
        )
    elif best is not None:
        score, version, hit = best
        never = version == first and stated - version > 1
        yield Suggestion(
            "weights_never_delivered" if never else "stale_weights",
            score,
            f"the values are those of weight version {version}"
            + (", the first one," if version == first else "")
            + f" where {stated} is stated, {abs(stated - version)} {'behind' if version < stated else 'ahead'}; {hit}",
        )


def _in_pieces(found: Logprobs, said: dict[int, Logprobs], active: Mask) -> str:
    """Which version each stretch of tokens is of, where every bit is one of theirs; else an empty string."""
    whose = np.full(len(found), -1)
    for version, predicted in said.items():
        whose[(found.view(np.uint32) == predicted.view(np.uint32)) & (whose < 0)] = version
    whose = whose[active]
    starts = [0, *(at for at in range(1, len(whose)) if whose[at] != whose[at - 1])]
    if (whose < 0).any() or not 2 <= len(starts) <= _PIECES:
        return ""
    return ", ".join(f"{int(whose[at])} from token {at} on" for at in starts)


def half_updated_weights(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Some tensors of another version, the others of the one that is named: an update that was not whole."""
    if best := nearest_model(evidence, oracle, _half_updated(evidence, oracle)):
        yield best


def _half_updated(evidence: Evidence, oracle: Oracle) -> Iterator[tuple[str, str, Decoder]]:
    """Cause, name and decoder of the stated version with a part of one of the two before it, or of the first."""
    stated = evidence.record.weight_version
    before = [version for version in sorted(oracle.versions, reverse=True) if version < stated]
    for version in dict.fromkeys([*before[:2], *before[-1:]]):
        try:
            old = oracle.version(version)
        except VersionUnavailable:
            continue
        never = version == before[-1] and version not in before[:2]
        for name, is_old in _parts(oracle.decoder):
            weights = {n: (old if is_old(n) else oracle.decoder).weights[n] for n in oracle.decoder.weights}
            mixed = replace(oracle.decoder, weights=weights)
            cause = "weights_never_delivered" if never else "stale_weights"
            yield cause, f"version {stated} with {name} of version {version}", mixed


def _parts(decoder: Decoder) -> Iterator[tuple[str, Callable[[str], bool]]]:
    """What an update leaves out: tensors outside the layers, of one kind in all layers, or layers from one on."""
    layers = decoder.config.layers

    def layer_of(name: str) -> int:
        parts = name.split(".")
        return int(parts[2]) if parts[1] == "layers" else -1

    yield "the embedding", lambda name: name == "model.embed_tokens.weight"
    yield "the output layer", lambda name: name == "lm_head.weight"
    yield "everything outside the layers", lambda name: layer_of(name) < 0
    yield "all layers", lambda name: layer_of(name) >= 0
    yield "the norms", lambda name: "norm" in name
    for part, what in (("self_attn.", "attention"), ("mlp.", "the feed-forward part")):
        yield f"{what} in all layers", lambda name, part=part: part in name  # type: ignore[misc]
    kinds = sorted({name.split(".", 3)[3] for name in decoder.weights if name.startswith("model.layers.")})
    for kind in kinds:
        yield f"{kind.removesuffix('.weight')} in all layers", lambda name, kind=kind: name.endswith(kind)  # type: ignore[misc]
    for cut in dict.fromkeys(max(1, round(layers * share)) for share in (0.5, 0.25, 0.75)):
        yield f"everything after layer {cut - 1}", lambda name, cut=cut: not 0 <= layer_of(name) < cut  # type: ignore[misc]
        yield f"layers from {cut} on", lambda name, cut=cut: layer_of(name) >= cut  # type: ignore[misc]
        yield f"layers before {cut}", lambda name, cut=cut: 0 <= layer_of(name) < cut  # type: ignore[misc]
