"""What the auditor says, read from its API. The job prints these numbers and computes none of them itself."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Counts of one step, or of a whole run.

    max_abs: largest |rollout - trainer| logprob. recomputed_mismatched: recomputed tokens on which at least one side
    differs from the reference. queued: samples that wait to be recomputed. by_verdict: samples.
    """

    samples: int = 0
    compared_tokens: int = 0
    mismatched_tokens: int = 0
    max_abs: float = 0.0
    recomputed_tokens: int = 0
    recomputed_mismatched: int = 0
    queued: int = 0
    by_verdict: Mapping[str, int] = field(default_factory=dict)
    by_condition: Mapping[str, int] = field(default_factory=dict)
    by_side: Mapping[str, int] = field(default_factory=dict)
    by_cause: Mapping[str, int] = field(default_factory=dict)

    @property
    def not_comparable(self) -> int:
        """Samples that failed a precondition."""
        return self.by_verdict.get("not_comparable", 0)

    @property
    def pending(self) -> int:
        """Samples of which one side has not reported."""
        return self.by_verdict.get("pending", 0)

    @property
    def settled(self) -> bool:
        """Whether nothing is waited for."""
        return self.samples > 0 and self.pending == 0 and self.queued == 0
