"""What the auditor says, read from its API. The job prints these numbers and computes none of them itself."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from services.auditor_access import AuditorAccess

_TIMEOUT_SECONDS = 5.0
_POLL_SECONDS = 0.2
# At the end of a run, where no search for causes is over yet: one takes so long at most, by the auditor's defaults.
_CAUSES_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Counts of one step, or of a whole run.

    max_abs: largest |trainer - rollout| logprob, None where no two were finite. recomputed_mismatched: recomputed
    tokens on which at least one side differs from the reference. queued: samples that wait to be recomputed.
    by_verdict and so on: samples.
    """

    samples: int = 0
    compared_tokens: int = 0
    mismatched_tokens: int = 0
    max_abs: float | None = None
    recomputed_tokens: int = 0
    recomputed_mismatched: int = 0
    queued: int = 0
    by_verdict: Mapping[str, int] = field(default_factory=dict)
    by_condition: Mapping[str, int] = field(default_factory=dict)
    by_side: Mapping[str, int] = field(default_factory=dict)
    by_cause: Mapping[str, int] = field(default_factory=dict)
    by_reference: Mapping[str, int] = field(default_factory=dict)

    @property
    def not_comparable(self) -> int:
        """Samples that failed a precondition."""
        return self.by_verdict.get("not_comparable", 0)

    @property
    def pending(self) -> int:
        """Samples of which one side has not reported."""
        return self.by_verdict.get("pending", 0)

    @property
    def judged(self) -> bool:
        """Whether no verdict is waited for."""
        return self.samples > 0 and self.pending == 0 and self.queued == 0

    @property
    def searching(self) -> int:
        """Mismatches that have a verdict and whose causes are still being searched for."""
        return self.by_cause.get("searching", 0)

    @property
    def explained(self) -> bool:
        """Whether a search for causes is over, or none is waited for."""
        return not self.searching or not self.by_cause.keys() <= {"searching", "undiagnosed"}

    @property
    def settled(self) -> bool:
        """Whether nothing is waited for, neither a verdict nor a cause."""
        return self.judged and not self.searching

    @classmethod
    def from_json(cls, counts: Mapping[str, Any]) -> "Verdicts":
        """From a run or a step as the API writes them."""
        return cls(**{f.name: counts[f.name] for f in fields(cls)})


class AuditorApi:
    """The read API, for one run. Every method gives up after seconds, since the job must not wait for its referee."""

    def __init__(self, access: AuditorAccess, run_id: str) -> None:
        self._access = access
        self._run = f"/api/v1/runs/{quote(run_id, safe='')}"

    def run(self) -> Verdicts | None:
        """The whole run; None if the auditor does not answer or knows nothing of it."""
        return self._verdicts("")

    def step(self, step: int, samples: int = 0, seconds: float = 0.0) -> Verdicts | None:
        """One step, once `samples` samples of it are compared, or after `seconds`; None as for `run`."""
        deadline = time.monotonic() + seconds
        while True:
            verdicts = self._verdicts(f"/steps/{step}")
            done = verdicts is not None and verdicts.samples - verdicts.pending >= samples
            if done or time.monotonic() >= deadline:
                return verdicts
            time.sleep(_POLL_SECONDS)

    def is_settled(self, step: int) -> bool:
        """Whether nothing of this step is waited for."""
        verdicts = self._verdicts(f"/steps/{step}")
        return verdicts is not None and verdicts.settled

    def settle(self, samples: int, seconds: float) -> Verdicts | None:
        """The whole run, once all of `samples` are judged and nothing waits for the reference, or after `seconds`.

        Then, for a minute at most, until one search for causes is over where there are any.
        """
        deadline = time.monotonic() + seconds
        judged = self._run_once(lambda run: run.judged and run.samples >= samples, deadline)
        if judged is None or judged.explained:
            return judged
        return self._run_once(lambda run: run.explained, min(deadline, time.monotonic() + _CAUSES_SECONDS))

    def _run_once(self, holds: Callable[[Verdicts], bool], deadline: float) -> Verdicts | None:
        """The whole run once something holds of it, or as it is at the deadline."""
        while True:
            verdicts = self.run()
            if (verdicts is not None and holds(verdicts)) or time.monotonic() >= deadline:
                return verdicts
            time.sleep(_POLL_SECONDS)

    def metrics(self) -> str:
        """The text for Prometheus; empty if the auditor does not answer."""
        return (self._get("/metrics") or b"").decode()

    def _verdicts(self, path: str) -> Verdicts | None:
        body = self._get(self._run + path)
        try:
            return None if body is None else Verdicts.from_json(json.loads(body))
        except (ValueError, KeyError, TypeError):
            return None  # whoever answers there is no auditor, or one that is just being killed

    def _get(self, path: str) -> bytes | None:
        try:
            with self._access.get(path, _TIMEOUT_SECONDS) as answer:
                return answer.read()
        except (OSError, HTTPException):
            return None
