"""What the job knows of each step, a line of JSON a step in `steps.jsonl`: a run that goes on has its first steps too.

The verdicts are not here: the auditor keeps those, and may still change them.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.errors import CheckpointError
from services.loop import StepResult
from services.records import TrainOutcome, WeightVersion


class StepLog:
    """Appended to after every step; a step that is done again, from a checkpoint, replaces its first line."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def append(self, result: StepResult) -> None:
        """Add a step."""
        with self._file.open("a", encoding="utf-8") as log:
            log.write(json.dumps(_to_json(result)) + "\n")

    def go_on(self, next_step: int) -> list[StepResult]:
        """Forget the steps from `next_step` on, and return those before it, without their log-probabilities.

        A last line that was cut off belongs to a step that is done again. CheckpointError for a step that is missing.
        """
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        kept = [fields for fields in map(_parse, lines) if fields is not None and fields["step"] < next_step]
        if [fields["step"] for fields in kept] != list(range(next_step)):
            raise CheckpointError(f"{self._file} does not hold the {next_step} steps before the checkpoint")
        draft = self._file.with_suffix(f".{os.getpid()}")
        draft.write_text("".join(json.dumps(fields) + "\n" for fields in kept), encoding="utf-8")
        draft.rename(self._file)
        return [_of_json(fields) for fields in kept]


def total_by_phase(steps: Sequence[StepResult]) -> dict[str, float]:
    """Seconds of all steps together, by phase."""
    phases: dict[str, float] = {}
    for step in steps:
        for phase, seconds in step.seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    return phases


def _parse(line: str) -> dict[str, Any] | None:
    try:
        fields: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return fields


def _to_json(result: StepResult) -> dict[str, Any]:
    return {
        "step": result.step,
        "reward": result.reward,
        "response_tokens": result.response_tokens,
        "loss": result.outcome.loss,
        "grad_norm": result.outcome.grad_norm,
        "clip_fraction": result.outcome.clip_fraction,
        "weights": {
            "version": result.weights.version,
            "digest": result.weights.digest,
            "folder": str(result.weights.folder),
        },
        "seconds": result.seconds,
    }


def _of_json(fields: dict[str, Any]) -> StepResult:
    weights = fields["weights"]
    return StepResult(
        step=fields["step"],
        reward=fields["reward"],
        response_tokens=fields["response_tokens"],
        outcome=TrainOutcome((), fields["loss"], fields["grad_norm"], fields["clip_fraction"]),
        weights=WeightVersion(weights["version"], weights["digest"], Path(weights["folder"])),
        seconds=fields["seconds"],
    )
