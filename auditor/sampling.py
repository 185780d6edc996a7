"""Which samples the reference recomputes besides every mismatch, and what that choice can miss.

A fault that makes the two sides differ is always seen, for every pair is compared. What sampling is for is a fault
that both sides share: then only a recomputation can tell.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from auditor.records import SampleKey

_STEPS_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sample whose two sides agree. engine_id: that drew it. response_len: tokens of its response."""

    key: SampleKey
    engine_id: str
    response_len: int


class Policy(Protocol):
    """A rule for agreeing samples."""

    def wants(self, candidate: Candidate) -> bool:
        """Whether to recompute this sample. Asked once a sample."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Each sample with probability `p`, drawn from a hash of its name: every auditor and every restart agrees."""

    p: float

    def wants(self, candidate: Candidate) -> bool:
        """Whether the hash of the key falls below p."""
        return unit_hash(candidate.key) < self.p


@dataclass(frozen=True, slots=True)
class EveryStep:
    """Every sample of each n-th step, counted from step 0."""

    n: int

    def wants(self, candidate: Candidate) -> bool:
        """Whether the step is one of them."""
        return candidate.key.step % self.n == 0


@dataclass(slots=True)
class FirstOfStep:
    """The first k samples of each step and stratum, in the order in which they are complete.

    stratified: strata are the engine and the response length by powers of two; otherwise a step is one stratum. Samples
    are known by name: asked again, after a write that failed, the answer is the same. What was chosen is kept in
    memory, 8 bytes a sample: after a restart an open step may get up to k more, never fewer.
    """

    k: int
    stratified: bool = False
    # Hashes of names in ascending order. Two with one hash are both taken, in one place.
    _chosen: dict[tuple[str, int, str, int], "array[int]"] = field(default_factory=dict)

    def wants(self, candidate: Candidate) -> bool:
        """Whether it is one of the first k of its stratum."""
        stratum = (candidate.engine_id, candidate.response_len.bit_length()) if self.stratified else ("", 0)
        name = (candidate.key.run_id, candidate.key.step, *stratum)
        if name not in self._chosen:
            self._chosen[name] = array("q")
            while len(self._chosen) > _STEPS_REMEMBERED:
                del self._chosen[next(iter(self._chosen))]
        chosen, sample = self._chosen[name], hash(candidate.key.sample_id)
        at = bisect_left(chosen, sample)
        if at < len(chosen) and chosen[at] == sample:
            return True
        if len(chosen) == self.k:
            return False
        chosen.insert(at, sample)
        return True


@dataclass(frozen=True, slots=True)
class AnyOf:
    """What at least one of the policies wants; each is asked, for some count what they see."""

    policies: Sequence[Policy]

    def wants(self, candidate: Candidate) -> bool:
        """Whether one of them wants it."""
        return any([policy.wants(candidate) for policy in self.policies])


def make_policy(rate: float, every: int, first: int, per_stratum: int) -> Policy:
    """The policy of the settings `recompute_rate`, `_every`, `_first` and `_per_stratum`; 0 leaves one out."""
    policies: list[Policy] = [Rate(rate)]
    if every:
        policies.append(EveryStep(every))
    if first:
        policies.append(FirstOfStep(first))
    if per_stratum:
        policies.append(FirstOfStep(per_stratum, stratified=True))
    return AnyOf(policies)


def unit_hash(key: SampleKey) -> float:
    """A number in [0, 1) that depends on the key alone."""
    name = f"{key.run_id}\0{key.step}\0{key.sample_id}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") / 2**64


def miss_probability(p: float, fault_share: float, samples: int) -> float:
    """Chance that a fault on a share of `samples` escapes when each is recomputed with probability p.

    (1 − p) ** (fault_share · samples): every affected sample must be passed over.
    """
    for name, value in (("p", p), ("fault_share", fault_share)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}; it lies in 0..1")
    affected = fault_share * samples
    return 1.0 if affected == 0 else float((1.0 - p) ** affected)
