"""The result of a run: what the auditor found, what the job measured, whether a strict run may be called clean."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditor.client import Counts
from services.config import Numerics
from services.durable import replace_text
from services.loop import StepResult
from services.memory import Usage
from services.plot import write_plot
from services.report import counts, difference
from services.step_log import total_by_phase
from services.verdicts import Verdicts


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything about a run that is worth keeping.

    steps: of the whole run, also those before it was resumed. verdicts: the auditor's, by step, in their order; total:
    of the whole run. samples: how many the auditor should have compared.
    Of this process only: records (of both sides, by what became of them), setup_seconds (until both engines held
    the first weights), total_seconds, and peak (memory of all processes, when it was largest).
    error: what ended the run before its last step; empty where it came to its end.
    """

    run_id: str
    numerics: Numerics
    steps: Sequence[StepResult]
    verdicts: Sequence[Verdicts]
    total: Verdicts
    samples: int
    records: Counts
    setup_seconds: float
    total_seconds: float
    peak: Usage
    auditor_restarts: int
    error: str = ""

    @property
    def lost(self) -> str:
        """Records that were reported and that the auditor does not have; empty if there are none."""
        lost = {name: getattr(self.records, name) for name in ("refused", "dropped", "queued", "spooled")}
        return f"records that the auditor does not have: {counts(lost)}" if any(lost.values()) else ""

    def faults(self) -> list[str]:
        """Why a strict run may not be called clean; empty if it may. A native run promises nothing."""
        if self.numerics == "native":
            return []
        total = self.total
        judged = total.by_verdict.get("match", 0) + total.by_verdict.get("mismatch", 0)
        found = [
            (total.mismatched_tokens, f"{total.mismatched_tokens} tokens differ between rollout and trainer"),
            (total.recomputed_mismatched, f"{total.recomputed_mismatched} tokens differ from the reference"),
            (total.not_comparable, f"{total.not_comparable} samples are not comparable: {counts(total.by_condition)}"),
            (failed := total.by_reference.get("failed", 0), f"{failed} samples could not be recomputed"),
            (total.compared_tokens == 0, "nothing was compared"),
            (
                (waiting := total.by_reference.get("queued", 0)) and not total.recomputed_tokens,
                f"the reference has recomputed nothing yet; {waiting} samples wait for it",
            ),
            (judged + total.not_comparable < self.samples, f"only {judged} of {self.samples} samples were compared"),
            (self.lost, self.lost),
        ]
        return [text for is_so, text in found if is_so]

    def to_json(self) -> dict[str, Any]:
        """The contents of summary.json."""
        return {
            "run_id": self.run_id,
            "numerics": self.numerics,
            "steps": len(self.steps),
            "compared_tokens": self.total.compared_tokens,
            "mismatched_tokens": self.total.mismatched_tokens,
            "max_abs_diff": self.total.max_abs,
            "recomputed_tokens": self.total.recomputed_tokens,
            "recomputed_mismatched": self.total.recomputed_mismatched,
            "not_comparable_samples": self.total.not_comparable,
            "reward_per_step": [step.reward for step in self.steps],
            "seconds_by_phase": total_by_phase(self.steps),
            "setup_seconds": self.setup_seconds,
            "total_seconds": self.total_seconds,
            "peak_memory_bytes": self.peak.total,
            "peak_memory_by_process": dict(self.peak.by_role),
            "verdicts": dict(self.total.by_verdict),
            "not_comparable_by_condition": dict(self.total.by_condition),
            "mismatched_samples_by_side": dict(self.total.by_side),
            "mismatched_samples_by_cause": dict(self.total.by_cause),
            "waiting_for_recomputation": self.total.queued,
            "records": {name: getattr(self.records, name) for name in self.records.__slots__},
            "auditor_restarts": self.auditor_restarts,
            "weights": {"version": self.steps[-1].weights.version, "digest": self.steps[-1].weights.digest}
            if self.steps
            else None,
            "per_step": [_step_json(step, verdicts) for step, verdicts in zip(self.steps, self.verdicts, strict=True)],
            "faults": self.faults(),
            "error": self.error or None,
        }

    def write(self, folder: Path) -> None:
        """Write summary.json and plot.png."""
        replace_text(folder / "summary.json", json.dumps(self.to_json(), indent=2) + "\n")
        compared = self.total.compared_tokens
        title = f"{self.numerics}: {self.total.mismatched_tokens} of {compared} log-probabilities differ"
        write_plot(
            folder / "plot.png",
            title,
            [step.step for step in self.steps],
            [v.mismatched_tokens for v in self.verdicts],
            [v.compared_tokens for v in self.verdicts],
            [v.max_abs for v in self.verdicts],
        )

    def _weights(self) -> str:
        if not self.steps:
            return "–"
        newest = self.steps[-1].weights
        return f"version {newest.version}, sha256 {newest.digest[:16]}…"

    def _peak_by_role(self) -> dict[str, float]:
        by_size = sorted(self.peak.by_role.items(), key=lambda item: -item[1])
        return {role: size / 2**30 for role, size in by_size}

    def rows(self) -> list[tuple[str, str]]:
        """What the terminal shows."""
        total, records = self.total, self.records
        rewards = " ".join(f"{step.reward:.3f}" for step in self.steps)
        recomputed = f"{total.recomputed_tokens}, of which {total.recomputed_mismatched} differ from the reference"
        if total.queued:
            recomputed += f" ({total.queued} samples wait)"
        if failed := total.by_reference.get("failed", 0):
            recomputed += f" ({failed} samples could not be)"
        if skipped := total.by_reference.get("skipped", 0):
            recomputed += f" ({skipped} chosen samples found no room to wait)"
        return [
            ("numerics", self.numerics),
            ("reward by step", rewards or "–"),
            ("tokens compared", str(total.compared_tokens)),
            ("tokens that differ", f"{total.mismatched_tokens} (max |Δlogp| {difference(total.max_abs)})"),
            ("tokens recomputed", recomputed),
            ("verdicts", counts(total.by_verdict)),
            ("side that is wrong", counts(total.by_side)),
            ("weights", self._weights()),
            ("records", counts({name: getattr(records, name) for name in records.__slots__})),
            (
                "seconds",
                _table({"in all": self.total_seconds, "set-up": self.setup_seconds, **total_by_phase(self.steps)}, 1),
            ),
            ("peak memory, GiB", _table({"in all": self.peak.total / 2**30, **self._peak_by_role()}, 2)),
        ]


def _step_json(step: StepResult, verdicts: Verdicts) -> dict[str, Any]:
    return {
        "step": step.step,
        "reward": step.reward,
        "response_tokens": step.response_tokens,
        "loss": step.outcome.loss,
        "grad_norm": step.outcome.grad_norm,
        "clip_fraction": step.outcome.clip_fraction,
        "compared_tokens": verdicts.compared_tokens,
        "mismatched_tokens": verdicts.mismatched_tokens,
        "max_abs_diff": verdicts.max_abs,
        "recomputed_tokens": verdicts.recomputed_tokens,
        "verdicts": dict(verdicts.by_verdict),
        "seconds": step.seconds,
    }


def _table(values: Mapping[str, float], digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())
