"""Runs for a real Prometheus to watch: what is reported to an auditor, and how to wait for what comes of it."""

import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from auditor.client import AuditClient
from auditor.records import TrainerRecord
from deploy.tour.stack import Stack, running_stack
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import pair
from tests.auditor.test_reference import write_versions

Bend = Callable[[TrainerRecord], TrainerRecord]
# One step a second of the runs that are only watched, so that an interval of five minutes is not needed to see them.
STEPS = 20


@dataclass(frozen=True, slots=True)
class Watched:
    """auditor: asks its reference about mismatches only, writes their tokens, retires what is settled.

    mortal: one that nobody needs. hasty: one that waits for nobody: shows one run, gives a side a second and its
    reference a moment.

    weights: its `weights_root`. reporting: of the runs `clean`, `deaf` and `native`, done when all is reported.
    """

    auditor: AuditorProcess
    mortal: AuditorProcess
    hasty: AuditorProcess
    stack: Stack
    folder: Path
    weights: Path
    reporting: Future[None]

    def paged(self, **labels: str) -> set[str]:
        """Alerts that the pager was told of, with these labels."""
        return {
            alert["labels"]["alertname"]
            for alert in self.stack.firing("page")
            if labels.items() <= alert["labels"].items()
        }


def report(
    auditor: AuditorProcess, spool: Path, steps: range, bend: Bend = lambda record: record, run_id: str = "run"
) -> None:
    """Both sides of four samples a step, the trainer's bent, all durable when this returns."""
    client = AuditClient(auditor.grpc, run_id, spool_dir=spool / run_id, queue_size=64)
    for step in steps:
        for sample in range(4):
            rollout, trainer = pair(str(sample), step=step, run_id=run_id)
            client.submit_rollout(rollout)
            client.submit_trainer(bend(trainer))
    counts = client.flush(20)
    client.close()
    assert counts.queued + counts.spooled + counts.dropped + counts.refused == 0


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    """What `condition` returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
    return value


def label_values(stack: Stack, query: str, **chosen: str) -> set[str]:
    """What Grafana offers for a variable `label_values(SELECTOR, LABEL)`, asked as it asks. chosen: other variables."""
    asked = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
    assert asked is not None, query
    selector, label = asked.groups()
    for name in ("Cluster", "SessionName"):
        selector = selector.replace(f"${name}", chosen.get(name, ".*"))
    match = urllib.parse.urlencode({"match[]": selector})
    with urllib.request.urlopen(f"{stack.prometheus}/api/v1/label/{label}/values?{match}", timeout=30) as answer:
        return set(json.loads(answer.read())["data"])


def other_rope(record: TrainerRecord) -> TrainerRecord:
    """A trainer of which nothing can be compared."""
    return replace(record, positions=replace(record.positions, rope_digest="03" * 32))


def far_off(record: TrainerRecord) -> TrainerRecord:
    """A trainer further off than any framework's documentation allows."""
    return replace(record, logprobs=record.logprobs - np.float32(1.5))


@contextmanager
def watched_auditor(folder: Path) -> Iterator[tuple[AuditorProcess, Stack]]:
    """One auditor and all that watches it, for a test that wants it for itself."""
    with (
        running_auditor(folder / "auditor") as auditor,
        running_stack(folder / "stack", {"auditor": [auditor.http]}) as stack,
    ):
        wait_for(lambda: stack.query('up{job="auditor"} == 1'), 60)
        yield auditor, stack


@contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    """Auditors behind one Prometheus; what takes a minute to page about begins at once."""
    weights = write_versions(folder / "weights")
    reference = ("--weights-root", str(weights), "--recompute-rate", "0")
    retiring = ("--retain-days", "0.00001", "--retain-look-s", "0.5")
    retiring += ("--evidence", "mismatches", "--evidence-place", str(folder / "evidence"))
    haste = ("--pair-wait-s", "1", "--shown-runs", "1", "--shown-idle-s", "30")
    haste += ("--recompute-queue", "1", "--recompute-timeout-s", "0.001")
    with (
        running_auditor(folder / "auditor", *reference, *retiring) as auditor,
        running_auditor(folder / "mortal") as mortal,
        running_auditor(folder / "hasty", *reference, *haste) as hasty,
        ExitStack() as parts,
    ):
        jobs = {"auditor": auditor, "mortal-auditor": mortal, "hasty-auditor": hasty}
        targets = {job: [process.http] for job, process in jobs.items()}
        stack = parts.enter_context(running_stack(folder / "stack", targets))
        threads = parts.enter_context(ThreadPoolExecutor(1))
        wait_for(lambda: len(stack.query('up{job=~".*auditor"} == 1')) == len(jobs), 60)

        def watched_only() -> None:
            report(auditor, folder, range(1), far_off, run_id="native")
            for step in range(STEPS):
                report(auditor, folder, range(step, step + 1), run_id="clean")
                report(auditor, folder, range(step, step + 1), other_rope, run_id="deaf")
                time.sleep(1)

        yield Watched(auditor, mortal, hasty, stack, folder, weights, threads.submit(watched_only))
