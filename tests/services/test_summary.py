"""What a run's end says: the keys of summary.json, and when a strict run may not be called clean."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from matplotlib.axes import Axes
from rich.console import Console

from auditor.client import Counts
from services.alert import NAME, SEVERITY, mismatch_alert
from services.auditor_access import AuditorAccess
from services.config import build_config
from services.ending import conclude, give_account
from services.loop import StepResult
from services.memory import Usage
from services.records import TrainOutcome, WeightVersion
from services.report import Report, StepLine
from services.run_folder import Checkpoint, RunFolder
from services.summary import Summary
from services.verdicts import Verdicts

CLEAN = Verdicts(
    samples=4,
    compared_tokens=9,
    max_abs=0.0,
    recomputed_tokens=3,
    by_verdict={"match": 4},
    by_reference={"done": 1, "not_asked": 3},
)


def _summary(total=CLEAN, numerics="strict", samples=4):
    outcome = TrainOutcome(logprobs=(), loss=0.5, grad_norm=1.0, clip_fraction=0.0)
    step = StepResult(0, 0.25, 9, outcome, WeightVersion(2, "ab", Path()), {"rollout": 1.0, "train": 2.0})
    return Summary(
        run_id="r",
        numerics=numerics,
        steps=[step],
        verdicts=[total],
        total=total,
        samples=samples,
        records=Counts(accepted=8),
        setup_seconds=3.0,
        total_seconds=9.0,
        peak=Usage(2**30, {"trainer": 2**30}),
        auditor_restarts=0,
    )


def test_the_summary_has_the_promised_keys(tmp_path):
    _summary().write(tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["numerics"] == "strict"
    assert found["steps"] == 1
    assert found["compared_tokens"] == 9
    assert found["mismatched_tokens"] == 0
    assert found["max_abs_diff"] == 0
    assert found["recomputed_tokens"] == 3
    assert found["recomputed_mismatched"] == 0
    assert found["not_comparable_samples"] == 0
    assert found["reward_per_step"] == [0.25]
    assert found["seconds_by_phase"] == {"rollout": 1.0, "train": 2.0}
    assert (tmp_path / "plot.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("total", "said"),
    [
        (CLEAN, ["0 of 9 tokens differ"]),
        (replace(CLEAN, mismatched_tokens=1), []),
        (Verdicts(), ["nothing was compared"]),
    ],
)
def test_a_plot_without_bars_says_why(tmp_path, monkeypatch, total, said):
    drawn, text = [], Axes.text
    monkeypatch.setattr(Axes, "text", lambda axes, x, y, s, **how: drawn.append(s) or text(axes, x, y, s, **how))
    _summary(total).write(tmp_path)
    assert drawn == said


def test_a_clean_strict_run_has_no_fault():
    assert _summary().faults() == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mismatched_tokens": 1, "by_verdict": {"match": 3, "mismatch": 1}}, "1 tokens differ between"),
        ({"recomputed_mismatched": 2}, "2 tokens differ from the reference"),
        (
            {"by_verdict": {"match": 3, "not_comparable": 1}, "by_condition": {"weights": 1}},
            "not comparable: 1 weights",
        ),
        ({"compared_tokens": 0, "by_verdict": {}}, "nothing was compared"),
        ({"by_verdict": {"match": 3, "pending": 1}}, "only 3 of 4 samples were compared"),
        ({"by_reference": {"done": 1, "failed": 2}}, "2 samples could not be recomputed"),
        ({"recomputed_tokens": 0, "by_reference": {"queued": 4}}, "recomputed nothing yet; 4 samples wait for it"),
    ],
)
def test_a_strict_run_that_cannot_prove_itself_is_not_clean(changes, says):
    values = {name: getattr(CLEAN, name) for name in CLEAN.__slots__}
    total = Verdicts(**{**values, **changes})
    assert any(says in fault for fault in _summary(total).faults())
    assert _summary(total, numerics="native").faults() == []


@pytest.mark.parametrize(("numerics", "code"), [("strict", 1), ("native", 0)])
def test_a_mismatch_makes_a_strict_run_exit_with_1_and_a_native_one_with_0(tmp_path, numerics, code):
    values = {name: getattr(CLEAN, name) for name in CLEAN.__slots__}
    total = Verdicts(**{**values, "mismatched_tokens": 1, "by_verdict": {"match": 3, "mismatch": 1}})
    folder = RunFolder.create(build_config({"run": {"directory": str(tmp_path)}}))
    with Report(1, 0) as report:
        assert conclude(_summary(total, numerics), folder, report, None) == code
        assert conclude(_summary(CLEAN, numerics), folder, report, None) == 0


def _said(do):
    shown = io.StringIO()
    with Report(1, 0, Console(file=shown, width=400)) as report:
        do(report)
    return shown.getvalue()


def test_a_run_whose_auditor_goes_on_says_where_to_look(tmp_path):
    folder = RunFolder.create(build_config({"run": {"directory": str(tmp_path)}}))
    running = AuditorAccess("host:1", "https://host:2/")
    said = _said(lambda report: conclude(_summary(), folder, report, None, running))
    run = folder.run_id
    assert (
        f"look at it: https://host:2/#/run/{run} (page), https://host:2/api/v1/runs/{run}, https://host:2/metrics"
        in said
    )
    assert "look again" not in said


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_whose_auditor_has_ended_is_looked_at_again_with_its_weights_where_it_has_them(tmp_path, kept):
    """An auditor without weights gives up the searches for causes that the end of the run has cut off."""
    folder = RunFolder.create(build_config({"run": {"directory": str(tmp_path)}}))
    (folder.path / "ledger.sqlite").touch()
    if kept:
        (folder.path / "weights").mkdir(exist_ok=True)
    said = _said(lambda report: conclude(_summary(), folder, report, None))
    root = f" --weights-root {folder.path / 'weights'}" if kept else ""
    assert f"-m auditor.main --ledger {folder.path / 'ledger.sqlite'}{root} --http 127.0.0.1:9464" in said


def test_a_run_whose_records_wait_on_disk_says_how_they_get_to_an_auditor_that_goes_on(tmp_path):
    folder = RunFolder.create(build_config({"run": {"directory": str(tmp_path)}}))
    (folder.path / "spool" / "rollout-0").mkdir(parents=True)
    waiting = replace(_summary(), records=Counts(accepted=3, spooled=5))
    running = AuditorAccess("host:1", "https://host:2/", "a/token", "ca.pem")
    said = _said(lambda report: conclude(waiting, folder, report, None, running))
    assert (
        f"-m auditor.submit {folder.path / 'spool' / 'rollout-0'} --address host:1 --token-file a/token --tls-ca ca.pem"
        in said
    )


def test_chosen_samples_that_the_reference_had_no_room_for_are_shown():
    values = {name: getattr(CLEAN, name) for name in CLEAN.__slots__}
    total = Verdicts(**{**values, "by_reference": {"done": 1, "skipped": 3}})
    assert "(3 chosen samples found no room to wait)" in dict(_summary(total).rows())["tokens recomputed"]


def test_a_run_that_ends_by_an_error_leaves_what_was_done_and_says_what_the_auditor_lacks(tmp_path):
    folder = RunFolder.create(build_config({"run": {"directory": str(tmp_path)}}))
    broken = replace(_summary(samples=8), error="disk full", records=Counts(accepted=3, dropped=2, spooled=1))
    said = _said(lambda report: give_account(broken, ["trainer"], folder, report))
    found = json.loads((folder.path / "summary.json").read_text())
    assert (found["error"], found["steps"], found["compared_tokens"]) == ("disk full", 1, 9)
    assert "ended after 1 steps: " in said
    assert "records that the auditor does not have: 2 dropped, 1 spooled" in said
    assert "the trainer does not answer; what it had not sent to the auditor may be lost, but for " in said
    assert "--resume" not in said


def test_how_to_go_on_is_said_only_where_there_is_a_checkpoint(tmp_path):
    folder = RunFolder.create(build_config({"run": {"directory": str(tmp_path)}}))
    with folder.checkpoint(4) as scratch:
        folder.finish_checkpoint(Checkpoint(scratch, 4, 5, "ab"))
    said = _said(lambda report: give_account(_summary(), [], folder, report))
    assert f"to go on from step 4: --resume {folder.path}" in said
    assert "the auditor" not in said


def test_a_summary_that_cannot_be_written_hides_nothing_else(tmp_path):
    folder = RunFolder.create(build_config({"run": {"directory": str(tmp_path)}}))
    (folder.path / "summary.json").mkdir()
    broken = replace(_summary(), records=Counts(dropped=2))
    said = _said(lambda report: give_account(broken, [], folder, report))
    assert "the summary of the 1 steps that were done cannot be written: " in said
    assert "records that the auditor does not have: 2 dropped" in said


@pytest.mark.parametrize("what", ["refused", "dropped", "queued", "spooled"])
def test_a_record_that_the_auditor_does_not_have_is_a_fault(what):
    """A resumed run that sampled other bits: the auditor keeps the first records and refuses the second."""
    records = Counts(**{"accepted": 8, what: 2})
    assert replace(_summary(), records=records).faults() == [f"records that the auditor does not have: 2 {what}"]
    assert replace(_summary(), records=Counts(accepted=4, duplicate=4)).faults() == []


def test_the_bar_on_a_terminal_says_how_far_it_is_and_what_is_waited_for():
    shown = io.StringIO()
    with Report(4, 1, Console(file=shown, force_terminal=True, width=120)) as report:
        report.begin()
        report.step(StepLine(_summary().steps[0], CLEAN))
        report.waiting("waiting for the auditor's last verdicts")
    assert "2/4" in shown.getvalue()
    assert "waiting for the auditor's last verdicts" in shown.getvalue()
    assert "━" in shown.getvalue()


def test_samples_that_never_reached_the_auditor_are_missed():
    assert _summary(samples=5).faults() == ["only 4 of 5 samples were compared"]


def test_a_step_line_says_when_the_auditor_is_silent():
    step = _summary().steps[0]
    assert "the auditor does not answer; records wait in the spool" in str(StepLine(step, None))
    assert "4 match" in str(StepLine(step, CLEAN))


def test_the_alert_is_the_rule_s_own_text_and_is_silent_about_other_runs():
    metrics = (
        'auditor_mismatched_tokens_total{run_id="r",side="pair"} 3.0\n'
        'auditor_mismatched_tokens_total{run_id="r",side="trainer"} 2.0\n'
        'auditor_mismatched_tokens_total{run_id="other",side="pair"} 7.0\n'
    )
    rules = yaml.safe_load(Path("deploy/prometheus/rules.yml").read_text())
    (rule,) = [r for g in rules["groups"] for r in g["rules"] if r.get("alert") == NAME]
    text = rule["annotations"]["summary"].replace("{{ $labels.run_id }}", "r").replace("{{ $value }}", "3")
    assert mismatch_alert(metrics, "r") == f"alert {NAME} ({SEVERITY}): {text}"
    assert rule["labels"]["severity"] == SEVERITY
    assert mismatch_alert(metrics, "silent") is None


def test_a_step_of_nothing_finite_is_written_as_a_dash_and_not_as_no_difference(tmp_path):
    counted = {**asdict(CLEAN), "max_abs": None, "mismatched_tokens": 9, "by_verdict": {"mismatch": 4}}
    total = Verdicts.from_json(counted)
    _summary(total=total, numerics="native").write(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["max_abs_diff"] is None
    assert ("tokens that differ", "9 (max |Δlogp| –)") in _summary(total=total).rows()
