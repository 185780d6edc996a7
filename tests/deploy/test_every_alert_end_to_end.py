"""Every alert there is, once, from its cause to its receiver: a quarter of an hour, for the slowest waits that long.

Real auditors, a real Prometheus on the rules as they are deployed, a real Alertmanager and webhook, Ray's own exporter.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import psutil
import pytest
import yaml

from auditor.client import AuditClient, Counts
from auditor.records import Record, RolloutRecord, TrainerRecord
from deploy.tour.stack import Stack, running_stack
from tests.auditor.postgres_server import PostgresServer
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import one_ulp_off, pair, with_logprobs
from tests.auditor.test_clock import Machine
from tests.auditor.test_reference import true_pair, write_versions
from tests.deploy.watched import far_off, other_rope, report, wait_for

RULES: Final = Path(__file__).parents[2] / "deploy/prometheus/rules.yml"
RECEIVERS: Final = {"critical": "page", "warning": "notify", "none": "heartbeat"}
SECONDS: Final = 1100  # the slowest wait ten minutes for a lag of ten minutes, then one more, then Alertmanager
# A run, or an auditor's job, of which each alert must be told; the rest may be of any.
WHOSE: Final = {
    "MismatchedTokens": {"run_id": "differs"},
    "NonfiniteLogprobs": {"run_id": "nan", "side": "trainer"},
    "NothingCompared": {"run_id": "deaf"},
    "NotComparableShare": {"run_id": "partly"},
    "WeightVersionSkew": {"run_id": "skewed"},
    "OneSideSilent": {"run_id": "lonely"},
    "RecordsMissing": {"run_id": "gappy", "side": "trainer"},
    "RecordsRefused": {"run_id": "twice"},
    "RecomputeFails": {"run_id": "differs", "code": "weights_digest"},
    "RecomputeSkips": {"run_id": "hurried"},
    "RecomputeBehind": {"job": "stopped-auditor"},
    "SearchBehind": {"job": "searching-auditor"},
    "DriftEffectiveSampleSize": {"run_id": "uneven"},
    "DriftChiSquare": {"run_id": "uneven"},
    "DriftKL": {"run_id": "far"},
    "DriftK3": {"run_id": "far"},
    "DriftMeanAbsDiff": {"run_id": "far"},
    "DriftTokenMultProbError": {"run_id": "far"},
    "AuditorDown": {"job": "mortal-auditor"},
    "AuditorAbsent": {"job": "gone-auditor"},
    "AuditorFault": {"job": "broken-auditor", "part": "judge"},
    "CallsFail": {"job": "auditor", "part": "grpc"},
    "ClockOff": {"job": "late-auditor"},
    "LedgerSlow": {"job": "slow-auditor"},
    "UpkeepFails": {"job": "full-auditor", "part": "retention"},
    "RecordsSpooled": {"run_id": "unheard"},
    "RecordsDropped": {"run_id": "unheard"},
    "Watchdog": {},
}
# And others, of whom they must be told as well: a client outside of Ray, through the auditor.
ALSO: Final = {"RecordsSpooled": {"run_id": "alone"}, "RecordsDropped": {"run_id": "alone"}}
# A defect, put there on purpose: no caller's mistake makes one.
DEFECT: Final = """
import auditor.pipeline
def judge_pair(*_):
    raise ZeroDivisionError("on purpose")
auditor.pipeline.judge_pair = judge_pair
"""
# Ray's metrics of a job whose auditor never answers, whose spool has room for some records and not for all.
UNHEARD: Final = """
import sys, time
from dataclasses import replace
from pathlib import Path
import ray
from auditor.client import AuditClient
from services.metrics import JobMetrics
from tests.auditor.samples import pair
ray.init(num_cpus=1, include_dashboard=True, log_to_driver=False)
metrics = JobMetrics("unheard", "strict")
with AuditClient("127.0.0.1:9", "unheard", spool_dir=Path(sys.argv[1]), queue_size=2, spool_limit_bytes=4096) as client:
    for sample in range(64):
        client.submit_rollout(replace(pair(str(sample))[0], run_id="unheard"))
    while True:
        metrics.records("rollout", client.counts)
        time.sleep(1)
"""


def weights_of_another_step(record: TrainerRecord) -> TrainerRecord:
    return replace(record, weight_version=record.weight_version + 1)


def uneven(record: TrainerRecord) -> TrainerRecord:
    """One token in eight four nats likelier, the others as much less: few of them carry all the weight."""
    signs = np.where(np.arange(len(record.logprobs)) % 8, np.float32(-4), np.float32(4))
    return replace(record, logprobs=record.logprobs + signs)


def not_a_number(record: TrainerRecord) -> TrainerRecord:
    changed: TrainerRecord = with_logprobs(record, 3, float("nan"))
    return changed


def what_steps_say(auditor: AuditorProcess, spool: Path) -> None:
    """Whatever one report is enough for."""
    for run, bend in {
        "differs": one_ulp_off,
        "nan": not_a_number,
        "deaf": other_rope,
        "skewed": weights_of_another_step,
        "far": far_off,
        "uneven": uneven,
    }.items():
        report(auditor, spool, range(2), bend, run_id=run)
    report(auditor, spool, range(2), lambda record: other_rope(record) if record.sample_id == "0" else record, "partly")
    samples = [pair("0", step=step) for step in range(5)]
    rollouts = [rollout for rollout, _ in samples]
    trainers = [trainer for _, trainer in samples]
    send(auditor, spool, "lonely", *rollouts, trainers[0])
    send(auditor, spool, "gappy", *rollouts, *trainers[1:])
    assert send(auditor, spool, "twice", rollouts[0], one_ulp_off(rollouts[0])).refused == 1


def send(auditor: AuditorProcess, spool: Path, run_id: str, *records: Record) -> Counts:
    """Report these records as of one run; what became of them."""
    with AuditClient(auditor.grpc, run_id, spool_dir=spool / run_id) as client:
        for record in records:
            match record:
                case RolloutRecord():
                    client.submit_rollout(replace(record, run_id=run_id))
                case TrainerRecord():
                    client.submit_trainer(replace(record, run_id=run_id))
        return client.flush(20)


def what_workers_do(heard: dict[str, AuditorProcess], weights: Path, spool: Path) -> None:
    """More mismatches than may wait, a worker that stands still with one before it, and a search that does."""
    samples = [true_pair(weights, str(sample)) for sample in range(8)]
    bent = [one for rollout, trainer in samples for one in (rollout, one_ulp_off(trainer))]
    send(heard["hasty-auditor"], spool, "hurried", *bent)
    send(heard["searching-auditor"], spool, "searched", *bent[:4])
    stopped = heard["stopped-auditor"]
    assert stopped.process is not None
    for worker in psutil.Process(stopped.process.pid).children(recursive=True):
        os.kill(worker.pid, signal.SIGSTOP)
    report(stopped, spool, range(1), one_ulp_off, run_id="stopped")


def searches_that_hang(root: Path, weights: Path) -> tuple[str, ...]:
    """Flags of an auditor with a version that no verdict needs, each search reads, and nobody ever writes."""
    shutil.copytree(weights, root)
    shutil.copytree(root / "v000001", root / "v000003")
    (root / "v000003/model.safetensors").unlink()
    os.mkfifo(root / "v000003/model.safetensors")
    return ("--weights-root", str(root), "--recompute-rate", "0", "--recompute-timeout-s", "3600")


@contextmanager
def over_and_over(pause_s: float, act: Callable[[], Any]) -> Iterator[None]:
    """`act` again and again in a thread, until the block ends."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            act()
            over.wait(pause_s)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def malformed_call(auditor: AuditorProcess) -> None:
    with grpc.insecure_channel(auditor.grpc) as channel:
        call: Callable[..., bytes] = channel.unary_unary("/audit.v1.AuditService/Submit")
        with pytest.raises(grpc.RpcError):
            call(b"\xff" * 40, timeout=5)


class SlowDatabase:
    """A server that stands still for a second and a half whenever a record comes."""

    def __init__(self, server: PostgresServer, auditor: AuditorProcess, spool: Path) -> None:
        self._server, self._auditor, self._spool, self._step = server, auditor, spool, 0

    def report(self) -> None:
        self._server.freeze()
        thaw = threading.Timer(1.5, self._server.thaw)
        thaw.start()
        send(self._auditor, self._spool, "slow", *pair("0", step=self._step))
        thaw.join()
        self._step += 1


def told(stack: Stack) -> set[str]:
    """The alerts that the receiver of their severity was told of, each of whom it must be."""
    found = set()
    for rule in alerts():
        name = rule["alert"]
        firing = stack.firing(RECEIVERS[rule["labels"]["severity"]])
        wanted = [{"alertname": name, **whose} for whose in (WHOSE[name], ALSO.get(name, {}))]
        if all(any(each.items() <= alert["labels"].items() for alert in firing) for each in wanted):
            found.add(name)
    return found


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_each_alert_has_a_cause_here() -> None:
    assert {rule["alert"] for rule in alerts()} == WHOSE.keys()


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 200)
def test_every_alert_reaches_its_receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (shutil.which("prometheus") and (shutil.which("alertmanager") or shutil.which("prometheus-alertmanager"))):
        pytest.skip("prometheus or alertmanager is missing: make ops-tools")
    weights = write_versions(tmp_path / "weights")
    reference = ("--weights-root", str(weights), "--recompute-rate", "0")
    archive, spool = tmp_path / "archive", tmp_path / "spool"
    retiring = ("--retain-days", "0.00001", "--retain-look-s", "1", "--archive", str(archive))
    with ExitStack() as parts:

        def auditor(name: str, *flags: str) -> AuditorProcess:
            return parts.enter_context(running_auditor(tmp_path / name, *flags))

        server = PostgresServer()
        parts.callback(server.close)
        server.fresh_database()
        machine = Machine(tmp_path / "machine", monkeypatch)
        late = auditor("late")
        (tmp_path / "defect").mkdir()
        (tmp_path / "defect/sitecustomize.py").write_text(DEFECT)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'defect'}:{RULES.parents[2]}")
        broken = auditor("broken")
        monkeypatch.delenv("PYTHONPATH")
        heard = {
            "auditor": auditor("auditor", *reference),
            "mortal-auditor": auditor("mortal"),
            "hasty-auditor": auditor("hasty", *reference, "--recompute-queue", "1"),
            "stopped-auditor": auditor("stopped", *reference, "--recompute-timeout-s", "3600"),
            "searching-auditor": auditor("searching", *searches_that_hang(tmp_path / "hang", weights)),
            "limited-auditor": auditor("limited", "--rate-records", "0.001", "--rate-burst-s", "1"),
            "late-auditor": late,
            "broken-auditor": broken,
            "slow-auditor": auditor("slow", "--ledger", server.url),
            "full-auditor": auditor("full", *retiring),
        }
        gone = auditor("gone")
        short = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="al")))
        files = {"gone-auditor": tmp_path / "gone.json", "ray": short / "ray/prom_metrics_service_discovery.json"}
        files["gone-auditor"].write_text(f'[{{"targets": ["{gone.http}"], "labels": {{"cluster": "local"}}}}]')
        targets = {job: [process.http] for job, process in heard.items()}
        stack = parts.enter_context(running_stack(tmp_path / "stack", targets, files))
        wait_for(lambda: len(stack.query('up{job=~".*auditor"} == 1')) == len(heard) + 1, 60)
        parts.enter_context(unheard(tmp_path, short))
        parts.callback(alone(heard["limited-auditor"], spool).close, 0)
        began = time.monotonic()
        what_steps_say(heard["auditor"], spool)
        what_workers_do(heard, weights, spool)
        report(gone, spool, range(1), run_id="gone")
        report(broken, spool, range(1), run_id="broken")
        shutil.rmtree(archive)
        archive.write_text("not a folder")
        report(heard["full-auditor"], spool, range(1), run_id="full")
        machine.set(600.0)
        heard["mortal-auditor"].kill()
        wait_for(lambda: stack.query('run:auditor_active:bool{job="gone-auditor"} == 1'), 20)
        files["gone-auditor"].write_text("[]")
        parts.enter_context(over_and_over(5, lambda: malformed_call(heard["auditor"])))
        parts.enter_context(over_and_over(0.5, SlowDatabase(server, heard["slow-auditor"], spool).report))
        came = wait_for_all(stack, began)
        assert came.keys() == WHOSE.keys(), f"nobody was told of {sorted(WHOSE.keys() - came.keys())}"


def wait_for_all(stack: Stack, began: float) -> dict[str, float]:
    """Seconds after which each alert reached its receiver, of those that did."""
    came: dict[str, float] = {}
    while len(came) < len(WHOSE) and time.monotonic() - began < SECONDS:
        for name in told(stack) - came.keys():
            came[name] = time.monotonic() - began
        time.sleep(2)
    for name in sorted(came, key=lambda name: came[name]):
        print(f"{name} told after {came[name]:.0f} s")
    return came


def alone(limited: AuditorProcess, spool: Path) -> AuditClient:
    """A client outside of Ray, of an auditor that takes next to nothing of it, with a spool that has room for some."""
    client = AuditClient(limited.grpc, "alone", spool_dir=spool / "alone", queue_size=2, spool_limit_bytes=4096)
    for sample in range(64):
        client.submit_rollout(replace(pair(str(sample))[0], run_id="alone"))
    return client


@contextmanager
def unheard(folder: Path, short: Path) -> Iterator[None]:
    """Ray's sockets live in `short`, for their paths must be short."""
    environment = {**os.environ, "RAY_TMPDIR": str(short), "RAY_metrics_report_interval_ms": "1000"}
    with (folder / "unheard.log").open("wb") as output:
        job = subprocess.Popen(
            [sys.executable, "-c", UNHEARD, str(folder / "unheard")],
            cwd=RULES.parents[2], env=environment, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield
    finally:
        job.terminate()
        job.wait()
