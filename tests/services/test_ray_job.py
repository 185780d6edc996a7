"""The same program as a job on a running cluster: `ray job submit … -- python -m services.main …`."""

import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.models import write_tiny_model

pytestmark = pytest.mark.slow

RAY = str(Path(sys.executable).parent / "ray")


def _free_port():
    # Outside of the range that Ray keeps for its workers, 10002 to 19999.
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if not 10002 <= port <= 19999:
            return port


@pytest.fixture
def cluster(tmp_path_factory):
    """A head node on the loopback interface with token authentication; yields the jobs' URL and the environment."""
    environment = {
        **os.environ,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    port = _free_port()
    # Ray's sockets live in this folder, and their paths must be short.
    folder = tmp_path_factory.mktemp("ray")
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={_free_port()}", f"--dashboard-port={port}"]
    # The agent that starts jobs has one port on every machine otherwise, and another cluster's may hold it for a while.
    command += [f"--dashboard-agent-listen-port={_free_port()}"]
    command += [f"--temp-dir={folder}", "--object-store-memory=104857600", "--disable-usage-stats"]
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/version", head, folder / "head.log")
        yield f"http://127.0.0.1:{port}", environment
    finally:
        head.terminate()
        head.wait(60)


def _wait_for(url, head, log):
    deadline = time.monotonic() + 90
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return  # it answers, if only to ask for the token
        except OSError:
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.3)


def test_a_submitted_job_joins_its_cluster_and_comes_out_clean(cluster, tmp_path):
    url, environment = cluster
    tree = {
        "run": {"steps": 1, "directory": str(tmp_path / "runs")},
        "model": {"path": str(write_tiny_model(tmp_path / "model"))},
        "task": {"name": "tokens", "prompts_per_step": 2, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4, "max_model_len": 64, "kv_cache_mb": 16},
    }
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump(tree))
    command = [RAY, "job", "submit", "--address", url, "--", "python", "-m", "services.main", "--config", str(config)]
    done = _submit(command, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout + done.stderr
    assert "4 match" in done.stdout + done.stderr


def _submit(command, environment):
    """Ray's API answers before the agent that starts jobs has come, and says so; nothing else is tried again."""
    deadline = time.monotonic() + 90
    while True:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if "No available agent" not in done.stderr or time.monotonic() > deadline:
            return done
        time.sleep(1)
