"""A rollout engine, what it holds, and its audit sink: one process. Ray is added in `services.cluster`."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from auditor.client import Counts
from services.audit_sink import UNKNOWN_WEIGHTS, AuditSink, AuditTarget
from services.engines import RolloutEngine
from services.records import Request, Rollout, WeightVersion


class RolloutActor:
    """Samples, and reports every sample with the weights that the engine itself says it holds."""

    def __init__(self, make_engine: Callable[[], RolloutEngine], audit: AuditTarget) -> None:
        self._engine = make_engine()
        self._sink = AuditSink(audit, self._engine.facts())
        self._held = UNKNOWN_WEIGHTS

    def load(self, weights: WeightVersion) -> str:
        """Load a published version; return the digest of the engine's own tensors."""
        self._held = UNKNOWN_WEIGHTS
        digest = self._engine.load(weights.folder)
        self._held = replace(weights, digest=digest)
        return digest

    def generate(self, step: int, requests: Sequence[Request]) -> tuple[Rollout, ...]:
        """One response a request, in order; reported to the auditor before they are returned."""
        generated = self._engine.generate([r.prompt for r in requests], [r.sampling for r in requests])
        rollouts = tuple(
            Rollout(
                sample_id=request.sample_id,
                prompt=request.prompt,
                response=response.tokens,
                logprobs=response.logprobs,
                finish_reason=response.finish_reason,
                sampling=request.sampling,
                weights=self._held,
            )
            for request, response in zip(requests, generated, strict=True)
        )
        self._sink.put_rollouts(step, rollouts, self._held)
        return rollouts

    def flush(self, timeout: float) -> Counts:
        """Wait up to `timeout` seconds until every record is with the auditor; return the counts."""
        return self._sink.flush(timeout)

    def close(self) -> Counts:
        """Deliver what can be delivered and stop."""
        return self._sink.close()
