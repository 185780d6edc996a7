"""What the job knows of each step, a line of JSON a step in `steps.jsonl`: a run that goes on has its first steps too.

The verdicts are not here: the auditor keeps those, and may still change them.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from services.durable import naming, replace_text, sync
from services.errors import CheckpointError
from services.loop import StepResult
from services.records import TrainOutcome, WeightVersion
from services.stored import Stored


class _Weights(Stored):
    version: int
    digest: str
    folder: str


class _Line(Stored):
    step: int
    reward: float
    response_tokens: int
    loss: float
    grad_norm: float
    clip_fraction: float
    weights: _Weights
    seconds: dict[str, float]


class StepLog:
    """Appended to after every step; a step that is done again, from a checkpoint, replaces its first line."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def append(self, result: StepResult) -> None:
        """Add a step, and wait until it is on the disk: a checkpoint that comes after it counts on it."""
        is_new = not self._file.exists()
        with naming(self._file), self._file.open("a", encoding="utf-8") as log:
            log.write(_line_of(result).model_dump_json() + "\n")
            log.flush()
            os.fsync(log.fileno())
        if is_new:
            sync(self._file.parent)

    def go_on(self, next_step: int) -> list[StepResult]:
        """Forget the steps from `next_step` on, and return those before it, without their log-probabilities.

        A last line that was cut off belongs to a step that is done again. CheckpointError for a step that is missing,
        or a line that holds something else.
        """
        kept = [line for line in self._lines() if line.step < next_step]
        if [line.step for line in kept] != list(range(next_step)):
            raise CheckpointError(f"{self._file} does not hold the {next_step} steps before the checkpoint")
        replace_text(self._file, "".join(line.model_dump_json() + "\n" for line in kept))
        return [_result_of(line) for line in kept]

    def _lines(self) -> list[_Line]:
        lines = self._file.read_bytes().splitlines() if self._file.exists() else []
        found = []
        for number, line in enumerate(lines, 1):
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                continue  # cut off
            found.append(_Line.of(content, f"{self._file}, line {number}"))
        return found


def total_by_phase(steps: Sequence[StepResult]) -> dict[str, float]:
    """Seconds of all steps together, by phase."""
    phases: dict[str, float] = {}
    for step in steps:
        for phase, seconds in step.seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    return phases


def _line_of(result: StepResult) -> _Line:
    weights = result.weights
    return _Line(
        step=result.step,
        reward=result.reward,
        response_tokens=result.response_tokens,
        loss=result.outcome.loss,
        grad_norm=result.outcome.grad_norm,
        clip_fraction=result.outcome.clip_fraction,
        weights=_Weights(version=weights.version, digest=weights.digest, folder=str(weights.folder)),
        seconds=result.seconds,
    )


def _result_of(line: _Line) -> StepResult:
    return StepResult(
        step=line.step,
        reward=line.reward,
        response_tokens=line.response_tokens,
        outcome=TrainOutcome((), line.loss, line.grad_norm, line.clip_fraction),
        weights=WeightVersion(line.weights.version, line.weights.digest, Path(line.weights.folder)),
        seconds=line.seconds,
    )
