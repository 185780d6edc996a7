"""One rank of the trainer, what it holds, and (on rank 0) its audit sink. Ray is added in `services.cluster`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from auditor.client import Counts
from services.audit_sink import UNKNOWN_WEIGHTS, AuditSink, AuditTarget
from services.engines import TrainerEngine
from services.errors import TrainingError
from services.records import Batch, Logprobs, TrainOutcome, WeightVersion


class TrainerActor:
    """Trains, and reports the first forward on every sample with the weights that the engine itself says it holds.

    All ranks are called alike and at the same time; only rank 0 (audit is not None) reports.
    """

    def __init__(self, make_engine: Callable[[], TrainerEngine], audit: AuditTarget | None) -> None:
        self._engine = make_engine()
        self._sink = AuditSink(audit, self._engine.facts()) if audit else None
        self._held = UNKNOWN_WEIGHTS

    def load(self, weights: WeightVersion) -> str:
        """Load a published version; return the digest of the engine's own tensors."""
        self._held = UNKNOWN_WEIGHTS
        digest = self._engine.load(weights.folder)
        self._held = replace(weights, digest=digest)
        return digest

    def train(self, batch: Batch) -> TrainOutcome:
        """One step. The weights have no version afterwards, until they are exported as one."""
        held, self._held = self._held, UNKNOWN_WEIGHTS
        try:
            outcome = self._engine.train(batch)
        except TrainingError:
            # What could not be learnt from, such as a NaN, is what the auditor must see.
            self._report(batch, self._engine.score_batch(batch), held)
            raise
        self._report(batch, outcome.logprobs, held, outcome.layer_digests)
        return outcome

    def export(self, version: int, scratch: Path, final: Path) -> str:
        """Write the weights to `scratch`; they count as `version`, in `final`, from now on. Return their digest."""
        digest = self._engine.export(scratch)
        self._held = WeightVersion(version, digest, final)
        return digest

    def save_checkpoint(self, folder: Path) -> None:
        """Write what the next step's bits depend on."""
        self._engine.save_checkpoint(folder)

    def load_checkpoint(self, folder: Path, weights: WeightVersion) -> str:
        """Restore a checkpoint made when `weights` were the newest version; return the digest of what is held."""
        self._held = UNKNOWN_WEIGHTS
        digest = self._engine.load_checkpoint(folder)
        self._held = replace(weights, digest=digest)
        return digest

    def _report(
        self,
        batch: Batch,
        logprobs: Sequence[Logprobs],
        held: WeightVersion,
        layers: Sequence[tuple[str, ...]] = (),
    ) -> None:
        if self._sink:
            self._sink.put_training(batch, logprobs, held, layers)

    def flush(self, timeout: float) -> Counts:
        """Wait up to `timeout` seconds until every record is with the auditor; return the counts."""
        return self._sink.flush(timeout) if self._sink else Counts()

    def close(self) -> Counts:
        """Deliver what can be delivered and stop."""
        return self._sink.close() if self._sink else Counts()
