"""The end of a run: what is written, what is said, and the exit code. Also where the end is an error."""

import sys
from pathlib import Path
from urllib.parse import quote

from services.auditor_access import AuditorAccess
from services.errors import CheckpointError
from services.report import Report
from services.run_folder import RunFolder
from services.summary import Summary

_LOOK_AGAIN = "127.0.0.1:9464"


def conclude(
    summary: Summary, folder: RunFolder, report: Report, alert: str | None, running: AuditorAccess | None = None
) -> int:
    """Write the summary, say what it says, and return the exit code: 1 if a strict run is not clean.

    running: an auditor that goes on when the run has ended.
    """
    summary.write(folder.path)
    folder.point_latest()
    report.summary(summary.rows())
    for name in ("summary.json", "plot.png", "ledger.sqlite"):
        if (folder.path / name).exists():
            report.say(shown(folder.path / name))
    ledger = folder.path / "ledger.sqlite"
    if running:
        report.say(look_at(running, folder.run_id))
    elif ledger.exists():
        # Our own auditor has ended with the run; its page, API and metrics are one command away. Without weights
        # it would give up the searches for causes that the run's end has cut off.
        weights = folder.path / "weights"
        root = f" --weights-root {shown(weights)}" if weights.is_dir() else ""
        command = f"{_python()} -m auditor.main --ledger {shown(ledger)}{root} --http {_LOOK_AGAIN}"
        report.say(f"look again: {command}, then http://{_LOOK_AGAIN}")
    if alert:
        report.say(alert)
    for fault in summary.faults():
        report.say(f"NOT CLEAN: {fault}")
    if running and summary.records.spooled:
        for side in sorted((folder.path / "spool").iterdir()):
            report.say(f"deliver what waits: {_python()} -m auditor.submit {shown(side)} {_submit_flags(running)}")
    return 1 if summary.faults() else 0


def give_account(summary: Summary, silent: list[str], folder: RunFolder, report: Report) -> None:
    """Before an error ends the run: write what was done until then, say what the auditor lacks and how to go on.

    silent: sides that do not say any more what became of their records.
    """
    try:
        summary.write(folder.path)
        report.say(f"ended after {len(summary.steps)} steps: {shown(folder.path / 'summary.json')}")
    except OSError as error:
        report.say(f"the summary of the {len(summary.steps)} steps that were done cannot be written: {error}")
    for side in silent:
        spool = shown(folder.path / "spool")
        report.say(f"the {side} does not answer; what it had not sent to the auditor may be lost, but for {spool}")
    if summary.lost:
        report.say(summary.lost)
    try:
        next_step = folder.newest_checkpoint().next_step
    except CheckpointError:
        return
    report.say(f"to go on from step {next_step}: --resume {shown(folder.path)}")


def look_at(running: AuditorAccess, run_id: str) -> str:
    """Where a running auditor shows a run: page, API, metrics."""
    base, run = running.http.rstrip("/"), quote(run_id, safe="")
    return f"look at it: {base}/#/run/{run} (page), {base}/api/v1/runs/{run}, {base}/metrics"


def _submit_flags(running: AuditorAccess) -> str:
    files = ("token_file", "tls_ca", "tls_certificate", "tls_key")
    given = [f"--{name.replace('_', '-')} {file}" for name in files if (file := getattr(running, name))]
    return " ".join([f"--address {running.grpc}", *given])


def _python() -> str:
    return shown(Path(sys.executable))


def shown(path: Path) -> str:
    """As a person would write it from here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
