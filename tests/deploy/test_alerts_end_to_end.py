"""A real auditor, a real Prometheus, a real Alertmanager and a real webhook, scraping once a second."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.client import AuditClient
from auditor.records import TrainerRecord
from deploy.tour.stack import Stack
from tests.auditor.processes import AuditorProcess
from tests.auditor.samples import one_ulp_off, pair
from tests.auditor.test_unpaired import send
from tests.deploy.watched import Watched, report, wait_for, watched_auditor

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]


def inject(auditor: AuditorProcess, stack: Stack, folder: Path) -> None:
    """Three sound steps, then one in which a bit of each sample differs: paged in time, with what it is."""
    report(auditor, folder, range(3), run_id="injected")
    injected = time.time()
    bent = [pair(str(sample), step=3, run_id="injected") for sample in range(4)]
    # In one batch: a scrape between two of them would see a part, and the page tell of that.
    send(auditor, *(record for rollout, trainer in bent for record in (rollout, one_ulp_off(trainer))))
    page = wait_for(lambda: [a for a in stack.firing("page") if a["labels"].get("run_id") == "injected"], 20)[0]
    print(f"paged {page['at'] - injected:.1f} s after the first differing bit was sent")
    assert page["at"] - injected < 15
    assert page["labels"]["alertname"] == "MismatchedTokens"
    assert page["annotations"]["summary"] == "Run injected: 4 log-probabilities differ in their bits"
    assert "pair 4" in page["annotations"]["description"]


def test_an_injected_mismatch_pages_within_15_seconds_and_says_what_and_where(watched: Watched) -> None:
    inject(watched.auditor, watched.stack, watched.folder)


@pytest.mark.soak
@pytest.mark.parametrize("release", ["trixie", "forky"])
def test_so_it_does_on_later_releases_of_prometheus(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = REPOSITORY / "build/tools" / release / "usr/bin"
    if not programs.exists():
        pytest.skip(f"Debian {release}'s Prometheus is missing: make ops-tools")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with watched_auditor(tmp_path) as (auditor, stack):
        inject(auditor, stack, tmp_path)


def test_a_trainer_that_says_what_it_computed_as_nan_pages(watched: Watched) -> None:
    def not_a_number(record: TrainerRecord) -> TrainerRecord:
        values = record.logprobs.copy()
        values[3] = float("nan")
        return replace(record, logprobs=values)

    report(watched.auditor, watched.folder, range(1), not_a_number, run_id="nan")
    wait_for(lambda: watched.paged(run_id="nan") >= {"NonfiniteLogprobs", "MismatchedTokens"}, 20)
    assert "NonfiniteLogprobs" in watched.paged(run_id="nan", side="trainer")
    assert "NonfiniteLogprobs" not in watched.paged(run_id="nan", side="rollout")


def test_a_client_outside_of_ray_that_loses_records_pages(watched: Watched) -> None:
    """Neither its queue nor its spool has room for one."""
    with AuditClient(
        watched.auditor.grpc, "lossy", spool_dir=watched.folder / "lossy", queue_size=0, spool_limit_bytes=100
    ) as client:
        for rollout, trainer in (pair(str(sample), run_id="lossy") for sample in range(4)):
            client.submit_rollout(rollout)
            client.submit_trainer(trainer)
        assert client.counts.dropped > 0
        wait_for(lambda: "RecordsDropped" in watched.paged(run_id="lossy", side="both"), 30)


def test_an_auditor_that_dies_pages(watched: Watched) -> None:
    """Half a minute later: tests/deploy/test_silence_end_to_end.py waits for it."""
    watched.mortal.kill()
    wait_for(lambda: watched.stack.query('ALERTS{alertname="AuditorDown", job="mortal-auditor"}'), 20)
