"""What pages because nothing is heard, and who is left in peace: the same Prometheus, when its minutes are over."""

import pytest

from tests.deploy.watched import STEPS, Watched, wait_for

pytestmark = pytest.mark.slow


def test_a_run_of_which_nothing_is_compared_pages_and_a_clean_run_beside_it_never_does(watched: Watched) -> None:
    watched.reporting.result(60)
    stack = watched.stack
    compared = f'sum(auditor_compared_tokens_total{{run_id="clean"}}) == {STEPS * 4 * 32}'
    wait_for(lambda: stack.query(compared), 10)
    wait_for(lambda: "NothingCompared" in watched.paged(run_id="deaf"), 90)
    assert watched.paged(run_id="deaf") == {"NothingCompared"}
    assert watched.paged(run_id="clean") == set()
    assert stack.query('sum(auditor_mismatched_tokens_total{run_id="clean", side="pair"}) > 0') == []
    # Of the clean run nothing fired or was about to, at any time; of the other one this very query finds it.
    ever = 'count_over_time(ALERTS{{run_id="{}", alertname!="{}"}}[1h])'
    assert stack.query(ever.format("deaf", ""))
    assert stack.query(ever.format("clean", "")) == []


def test_that_nothing_is_compared_silences_that_a_share_of_it_is_not(watched: Watched) -> None:
    watched.reporting.result(60)
    wait_for(lambda: "NothingCompared" in watched.paged(run_id="deaf"), 90)
    # Half a minute is what Alertmanager waits before it tells of a warning.
    firing = 'ALERTS{alertname="NotComparableShare", run_id="deaf", alertstate="firing"}'
    wait_for(lambda: watched.stack.query(f"count_over_time({firing}[1h]) > 40"), 60)
    told = {(a["labels"]["alertname"], a["labels"].get("run_id")) for a in watched.stack.firing("notify")}
    assert ("NotComparableShare", "deaf") not in told


def test_an_auditor_that_died_has_paged(watched: Watched) -> None:
    if watched.mortal.process is not None and watched.mortal.process.poll() is None:
        watched.mortal.kill()
    wait_for(lambda: "AuditorDown" in watched.paged(job="mortal-auditor"), 60)
    assert "AuditorDown" not in watched.paged(job="auditor")


def test_how_far_a_native_run_is_off_reaches_somebody_although_that_it_differs_has_paged(watched: Watched) -> None:
    watched.reporting.result(60)
    wait_for(lambda: "MismatchedTokens" in watched.paged(run_id="native"), 60)
    levels = {"DriftKL", "DriftK3", "DriftMeanAbsDiff", "DriftTokenMultProbError"}

    def told() -> list[set[str]]:
        pages = [page["alerts"] for page in watched.stack.pages() if page["receiver"] == "notify"]
        names = [{a["labels"]["alertname"] for a in page if a["labels"].get("run_id") == "native"} for page in pages]
        return [found for found in names if found & levels]

    # One message for all of them, half a minute after the first.
    wait_for(told, 60)
    assert told() == [levels]
