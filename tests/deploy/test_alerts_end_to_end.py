"""A real auditor, a real Prometheus, a real Alertmanager and a real webhook, scraping once a second."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditor.client import AuditClient
from auditor.records import TrainerRecord
from deploy.tour.stack import Stack, running_stack
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import one_ulp_off, pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and (shutil.which("alertmanager") or shutil.which("prometheus-alertmanager"))),
        reason="prometheus or alertmanager is missing: make ops-tools",
    ),
]
REPOSITORY = Path(__file__).parents[2]
Bend = Callable[[TrainerRecord], TrainerRecord]


@contextmanager
def watched(folder: Path) -> Iterator[tuple[AuditorProcess, Stack]]:
    with (
        running_auditor(folder / "auditor") as auditor,
        running_stack(folder / "stack", {"auditor": [auditor.http]}) as stack,
    ):
        wait_for(lambda: stack.query('up{job="auditor"} == 1'), 60)
        yield auditor, stack


def report(
    auditor: AuditorProcess, folder: Path, steps: range, bend: Bend = lambda record: record, run_id: str = "run"
) -> None:
    """Both sides of four samples a step, the trainer's bent, all durable when this returns."""
    client = AuditClient(auditor.grpc, run_id, spool_dir=folder / "spool", queue_size=64)
    for step in steps:
        for sample in range(4):
            rollout, trainer = pair(str(sample), step=step, run_id=run_id)
            client.submit_rollout(rollout)
            client.submit_trainer(bend(trainer))
    counts = client.flush(20)
    client.close()
    assert counts.queued + counts.spooled + counts.dropped + counts.refused == 0


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
    return value


def paged(stack: Stack) -> set[str]:
    return {alert["labels"]["alertname"] for alert in stack.firing("page")}


@pytest.mark.parametrize(
    "release", ["this machine's", *(pytest.param(name, marks=pytest.mark.soak) for name in ("trixie", "forky"))]
)
def test_an_injected_mismatch_pages_within_15_seconds_and_says_what_and_where(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if release != "this machine's":
        programs = REPOSITORY / "build/tools" / release / "usr/bin"
        if not programs.exists():
            pytest.skip(f"Debian {release}'s Prometheus is missing: make ops-tools")
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with watched(tmp_path) as (auditor, stack):
        report(auditor, tmp_path, range(3))
        injected = time.time()
        report(auditor, tmp_path, range(3, 4), one_ulp_off)
        page = wait_for(lambda: stack.firing("page"), 20)[0]
        print(f"paged {page['at'] - injected:.1f} s after the first differing bit was sent")
        assert page["at"] - injected < 15
        assert page["labels"]["alertname"] == "MismatchedTokens"
        assert page["labels"]["run_id"] == "run"
        assert page["annotations"]["summary"] == "Run run: 4 log-probabilities differ in their bits"
        assert "pair 4" in page["annotations"]["description"]


def test_a_run_of_which_nothing_is_compared_pages_and_a_clean_run_beside_it_never_does(tmp_path: Path) -> None:
    def other_rope(record: TrainerRecord) -> TrainerRecord:
        return replace(record, positions=replace(record.positions, rope_digest="03" * 32))

    with watched(tmp_path) as (auditor, stack):
        for step in range(20):
            report(auditor, tmp_path, range(step, step + 1), run_id="clean")
            report(auditor, tmp_path, range(step, step + 1), other_rope, run_id="deaf")
            time.sleep(1)
        wait_for(lambda: stack.query('sum(auditor_compared_tokens_total{run_id="clean"}) == 20 * 4 * 32'), 10)
        wait_for(lambda: "NothingCompared" in paged(stack), 90)
        assert paged(stack) == {"NothingCompared"}
        assert {alert["labels"]["run_id"] for alert in stack.firing("page")} == {"deaf"}
        assert stack.query("sum(auditor_mismatched_tokens_total) > 0") == []
        # Of the clean run nothing fired or was about to, at any time; of the other one this very query finds it.
        ever = 'count_over_time(ALERTS{{run_id="{}", alertname="NothingCompared"}}[10m])'
        assert stack.query(ever.format("deaf"))
        assert stack.query(ever.replace(', alertname="NothingCompared"', "").format("clean")) == []


def test_a_trainer_that_says_what_it_computed_as_nan_pages_and_so_does_an_auditor_that_dies(tmp_path: Path) -> None:
    def not_a_number(record: TrainerRecord) -> TrainerRecord:
        values = record.logprobs.copy()
        values[3] = float("nan")
        return replace(record, logprobs=values)

    with watched(tmp_path) as (auditor, stack):
        report(auditor, tmp_path, range(1), not_a_number)
        wait_for(lambda: {"NonfiniteLogprobs", "MismatchedTokens"} <= paged(stack), 20)
        sides = {a["labels"]["side"] for a in stack.firing("page") if a["labels"]["alertname"] == "NonfiniteLogprobs"}
        assert sides == {"trainer"}
        auditor.kill()
        wait_for(lambda: "AuditorDown" in paged(stack), 60)
