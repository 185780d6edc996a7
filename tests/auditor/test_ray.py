"""The reference on a real Ray cluster: right, ended when it is late, waited for, and never the end of the auditor."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.auditor.processes import REPOSITORY, running_auditor
from tests.auditor.samples import one_ulp_off
from tests.auditor.test_recompute_queue import counted, root, stuck
from tests.auditor.test_reference import true_pair, weights_root
from tests.auditor.test_rounds import workers_of
from tests.auditor.test_unpaired import send

__all__ = ["root", "weights_root"]


class Cluster:
    """A head on a port that stays the same, of `cores` cores."""

    def __init__(self, ray: str, port: int) -> None:
        self._ray, self.port = ray, port
        self.cores = 2
        self._head: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [self._ray, "start", "--head", "--port", str(self.port), "--num-cpus", str(self.cores)]
        command += ["--include-dashboard", "false", "--block"]
        quiet = subprocess.DEVNULL
        self._head = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "Ray did not start"
                time.sleep(0.2)

    def end(self) -> None:
        if self._head is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._head.pid, signal.SIGKILL)
            self._head.wait(60)
            self._head = None


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    ray = shutil.which("ray", path=str(Path(sys.executable).parent))
    if ray is None:
        pytest.skip("Ray is missing")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The paths of Ray's sockets must be short, so its folder is not the test's own.
    settings = {
        "RAY_TMPDIR": tempfile.mkdtemp(prefix="ra"),
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": str(REPOSITORY),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(ray, port)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(settings["RAY_TMPDIR"], ignore_errors=True)


@pytest.mark.slow
def test_a_cluster_recomputes_and_an_actor_that_is_late_is_ended(cluster: Cluster, root: Path, tmp_path: Path) -> None:
    cluster.start()
    flags = ["--weights-root", str(root), "--recompute-rate", "1", "--recompute-pool", "ray"]
    flags += ["--recompute-timeout-s", "5", "--diagnose-per-step", "0"]
    with running_auditor(tmp_path / "a", *flags) as auditor:
        send(auditor, *stuck(root, "stuck"))
        for i in range(4):
            rollout, trainer = true_pair(root, f"{i}")
            send(auditor, one_ulp_off(rollout) if i == 0 else rollout, trainer)
        run = auditor.wait_for("/api/v1/runs/run", lambda r: r["queued"] == 0 and r["samples"] == 5, 90)
        assert (run["by_reference"], run["by_side"]) == ({"failed": 1, "done": 4}, {"unknown": 1, "rollout": 1})
        judged = auditor.get("/api/v1/runs/run/samples/0/stuck")["judgement"]
        assert judged["reference_error"].startswith("timed_out: ")
        assert counted(auditor, "recompute_worker_ends", reason="timed_out") == 1
        assert auditor.stop() == 0


@pytest.mark.soak
def test_while_a_cluster_has_no_core_free_samples_wait(cluster: Cluster, weights_root: Path, tmp_path: Path) -> None:
    cluster.cores = 0
    cluster.start()
    flags = ("--weights-root", str(weights_root), "--recompute-pool", "ray")
    with running_auditor(tmp_path / "a", *flags) as auditor:
        rollout, trainer = true_pair(weights_root, "0")
        send(auditor, one_ulp_off(rollout), trainer)
        deadline = time.monotonic() + 60
        while "no core was free" not in auditor.log:
            assert time.monotonic() < deadline, auditor.log
            time.sleep(0.2)
        run = auditor.get("/api/v1/runs/run")
        assert run["by_reference"] == {"queued": 1}
        assert auditor.stop() == 0


@pytest.mark.soak
def test_the_auditor_outlives_its_cluster_and_uses_the_next_one(
    cluster: Cluster, weights_root: Path, tmp_path: Path
) -> None:
    """Ray ends the process that it is in a minute after its cluster has gone. A search wants none of its one core."""
    cluster.cores = 1
    cluster.start()
    flags = ("--weights-root", str(weights_root), "--recompute-pool", "ray")
    with running_auditor(tmp_path / "a", *flags) as auditor:
        rollout, trainer = true_pair(weights_root, "0")
        send(auditor, one_ulp_off(rollout), trainer)
        auditor.wait_for("/api/v1/runs/run", lambda r: r["by_reference"] == {"done": 1}, 90)
        path = "/api/v1/runs/run/samples/0/0"
        searched = auditor.wait_for(path, lambda sample: sample["judgement"]["cause"] != "searching", 90)
        assert searched["judgement"]["causes"]
        (driver,) = workers_of(auditor)
        cluster.end()
        deadline = time.monotonic() + 120
        while driver in workers_of(auditor):
            assert time.monotonic() < deadline, auditor.log
            time.sleep(0.5)
        rollout, trainer = true_pair(weights_root, "1")
        send(auditor, one_ulp_off(rollout), trainer)
        while "no cluster to join" not in auditor.log:
            assert time.monotonic() < deadline, auditor.log
            time.sleep(0.2)
        assert auditor.get("/api/v1/runs/run")["by_reference"] == {"done": 1, "queued": 1}
        cluster.start()
        run = auditor.wait_for("/api/v1/runs/run", lambda r: r["queued"] == 0, 120)
        assert (run["by_reference"], run["by_side"]) == ({"done": 2}, {"rollout": 2})
        assert auditor.stop() == 0
