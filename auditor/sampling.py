"""Which samples the reference recomputes besides every mismatch, and what that choice can miss."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

from auditor.records import SampleKey


class Policy(Protocol):
    """A rule that looks at nothing but the name of a sample, so that every auditor and every restart agrees."""

    def wants(self, key: SampleKey) -> bool:
        """Whether to recompute this sample although its two sides agree."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Each sample with probability `p`, drawn from a hash of its name. p: 0..1."""

    p: float

    def wants(self, key: SampleKey) -> bool:
        """Whether the hash of the key falls below p."""
        return unit_hash(key) < self.p


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
