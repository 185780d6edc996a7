"""Who runs the reference is chosen by name; a pool that cannot be had fails the start; Ray is one of them."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from auditor.client import AuditClient
from auditor.errors import ConfigError, RecomputeError
from auditor.judge import ReferenceLogprobs
from auditor.recompute import Patience, RecomputePool
from auditor.recompute_queue import RecomputeQueue
from auditor.records import SampleKey
from auditor.weights_place import WeightsPlace
from auditor.workers import ProcessWorker, find
from tests.auditor.processes import REPOSITORY, running_auditor
from tests.auditor.samples import one_ulp_off
from tests.auditor.test_reference import true_pair, weights_root

__all__ = ["weights_root"]

# The first worker's process never gets past the start of its interpreter.
HANGS_ONCE = """
import pathlib, sys, time
if "auditor.recompute_worker" in sys.orig_argv:
    try:
        (pathlib.Path(__file__).parent / "hung").touch(exist_ok=False)
    except FileExistsError:
        pass
    else:
        time.sleep(600)
"""


def the_first_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sitecustomize.py").write_text(HANGS_ONCE)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_names_are_process_ray_or_a_function() -> None:
    assert find("process") is ProcessWorker
    assert find("auditor.workers:ProcessWorker") is ProcessWorker
    for name in ("nowhere", "nowhere:x", "auditor.workers:none", "auditor.workers"):
        with pytest.raises(ConfigError, match="recompute_pool"):
            find(name)


def test_a_worker_that_is_killed_fails_its_job_and_another_one_takes_it(weights_root: Path, tmp_path: Path) -> None:
    flags = ("--weights-root", str(weights_root), "--recompute-rate", "1")
    with (
        running_auditor(tmp_path, *flags) as auditor,
        AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client,
    ):
        assert auditor.process is not None
        for i in range(4):
            for thread in Path(f"/proc/{auditor.process.pid}/task").iterdir():
                with suppress(FileNotFoundError):  # a thread that has ended meanwhile
                    for pid in (thread / "children").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
            rollout, trainer = true_pair(weights_root, f"{i}")
            client.submit_rollout(rollout)
            client.submit_trainer(one_ulp_off(trainer))
            client.flush(10)
            run = auditor.wait_for("/api/v1/runs/run", lambda r, n=i: r["queued"] == 0 and r["samples"] == n + 1)
        assert (run["by_reference"], run["by_side"]) == ({"done": 4}, {"trainer": 4})
        assert auditor.stop() == 0


def test_a_worker_that_hangs_at_its_start_is_ended_and_another_one_takes_the_sample(
    weights_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    the_first_hangs(tmp_path, monkeypatch)
    queue, ends, key = RecomputeQueue(4), list[str](), SampleKey("run", 0, "0")
    said: Future[ReferenceLogprobs | RecomputeError] = Future()
    pool = RecomputePool(
        WeightsPlace(str(weights_root)),
        partial(ProcessWorker, start_s=2.0),
        1,
        queue,
        Patience(60, 60),
        lambda key: true_pair(weights_root, "0"),
        lambda key, outcome, seconds: said.set_result(outcome),
        ends.append,
    )
    try:
        queue.put(key, urgent=True)
        assert isinstance(said.result(30), ReferenceLogprobs)
    finally:
        pool.close()
    assert set(ends) == {"died"}


def test_one_that_hangs_is_waited_for_no_longer_than_it_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    the_first_hangs(tmp_path, monkeypatch)
    worker = ProcessWorker(WeightsPlace(str(tmp_path)), start_s=0.2)
    try:
        assert not worker.wait(0.05), "it may still come"
        started = time.monotonic()
        with pytest.raises(EOFError, match=r"the worker had not started after 0\.2 s"):
            worker.wait(10)
        assert time.monotonic() - started < 5
    finally:
        worker.stop()


def test_no_cluster_is_one_line_at_the_start(weights_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "auditor.main", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command += ["--ledger", str(tmp_path / "l"), "--weights-root", str(weights_root), "--recompute-pool", "ray"]
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1", "RAY_TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "auditor: recompute_pool ray: no cluster to join" in done.stderr.splitlines()[-1]
