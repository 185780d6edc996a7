"""Keys and values that do not belong to these weights, or that were computed in other pieces.

A prefix cache, a paged block or an update of the weights in the middle of a generation leaves keys and values of older
weights behind: what the response sees of its prefix is then not what its own weights would have computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from auditor.causes.evidence import CERTAIN, HINT, Evidence, Suggestion, bits_hit, explained, worth_saying
from auditor.causes.oracle import Oracle, VersionUnavailable
from auditor.compare import Logprobs
from rl_kernel.reference.ops import F32, I32, Bits, Reference

_BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_VERSIONS_TRIED = 3


@dataclass(frozen=True, slots=True)
class RecordKv(Reference):
    """The reference, keeping each layer's keys and values."""

    layers: list[tuple[Bits, Bits]] = field(default_factory=list)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's."""
        self.layers.append((k.copy(), v.copy()))
        return Reference.attention(self, q, k, v, cu_q, cu_k)


@dataclass(frozen=True, slots=True)
class ForeignKv(Reference):
    """The reference on keys and values of which the first `prefix` tokens are replaced, layer by layer."""

    layers: list[tuple[Bits, Bits]] = field(default_factory=list)
    prefix: int = 0

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence."""
        old_k, old_v = self.layers.pop(0)
        k, v = k.copy(), v.copy()
        k[: self.prefix], v[: self.prefix] = old_k[: self.prefix], old_v[: self.prefix]
        return Reference.attention(self, q, k, v, cu_q, cu_k)


def stale_kv(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Keys and values of an older version up to some token, the named weights after it."""
    stated, window = evidence.record.weight_version, oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    older = sorted((version for version in oracle.versions if version < stated), reverse=True)[:_VERSIONS_TRIED]
    best: tuple[float, str] | None = None
    for version in older:
        try:
            layers, old = _record(oracle, version)
        except VersionUnavailable:
            continue
        for prefix in _prefixes(evidence, oracle, old):
            predicted = _with_prefix(oracle, layers, old, prefix)
            score = explained(found, truth, predicted, active)
            if worth_saying(score) and (best is None or score > best[0]):
                hit = bits_hit(found, predicted, active)
                best = (
                    score,
                    f"keys and values of the first {prefix} tokens are those of weight version {version}; {hit}",
                )
            if best is not None and best[0] >= CERTAIN:
                yield Suggestion("stale_kv", *best)
                return
    if best is not None:
        yield Suggestion("stale_kv", *best)


def boundary(evidence: Evidence) -> Iterator[Suggestion]:
    """Equal bits up to a token at which a KV block or a chunk begins, differences from there on."""
    differs = np.flatnonzero(evidence.differs)
    active = np.flatnonzero(evidence.active)
    if differs.size < 2 or active.size == 0:
        return
    before = int((active < differs[0]).sum())
    after = int((active >= differs[0]).sum())
    # The first wrong value is that of the token after the first wrong query.
    starts = [int(evidence.positions[differs[0]]) - shift for shift in (0, 1)]
    blocks = [block for block in _BLOCKS for start in starts if start > 0 and start % block == 0]
    if before < 4 or not blocks or differs.size < 0.5 * after:
        return
    yield Suggestion(
        "kv_boundary",
        HINT + (0.05 if max(blocks) >= 64 else -0.1) + 0.05 * (before >= 8),
        f"the first {before} tokens are equal in every bit, then {differs.size} of {after} differ, from position"
        f" {int(evidence.positions[differs[0]])} on, where a block of {max(blocks)} begins",
    )


def _record(oracle: Oracle, version: int) -> tuple[list[tuple[Bits, Bits]], Logprobs]:
    """Keys and values of the whole window under an older version, and what that version would report."""
    decoder = oracle.version(version)
    recorder = RecordKv(**_settings(decoder.reference))
    hidden = oracle.hidden(replace(decoder, reference=recorder))
    return recorder.layers, oracle.from_logits(oracle.head(decoder, hidden[oracle.rows]))


def _with_prefix(oracle: Oracle, layers: list[tuple[Bits, Bits]], old: Logprobs, prefix: int) -> Logprobs:
    foreign = ForeignKv(**_settings(oracle.decoder.reference), layers=list(layers), prefix=prefix)
    new = oracle.logprobs(oracle.with_reference(foreign))
    return np.where(oracle.rows < prefix, old, new).astype(np.float32)


def _prefixes(evidence: Evidence, oracle: Oracle, old: Logprobs) -> list[int]:
    """Where a stale prefix may end: the prompt, its last whole block, or the first token that is not the old one's."""
    prompt = oracle.prompt_len
    candidates = [prompt - 1, prompt, *((prompt - 1) // block * block for block in (16, 64))]
    new = np.flatnonzero(evidence.found[oracle.window].view(np.uint32) != old.view(np.uint32))
    if new.size and new[0] > 0:
        candidates.append(int(oracle.rows[new[0]]))
    return [prefix for prefix in dict.fromkeys(candidates) if 0 < prefix < len(oracle.tokens)]


def _settings(reference: Reference) -> dict[str, Any]:
    return {f.name: getattr(reference, f.name) for f in fields(Reference)}
