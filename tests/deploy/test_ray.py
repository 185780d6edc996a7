"""A Ray cluster as deploy/ray starts it, and a job walked through as Ray's users do: submit, status, logs, metrics."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from deploy.tour.stack import free_ports, running, running_stack
from tests.deploy.test_helm import CHART, HELMS, helm
from tests.models import write_tiny_model

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "deploy" / "ray"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
BIN = Path(sys.executable).parent


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.name))
def test_scripts_are_valid_bash_and_executable(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert os.access(script, os.X_OK)


def test_a_worker_without_a_head_or_a_token_is_refused_in_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}
    for extra, word in (({}, "HEAD"), ({"HEAD": "127.0.0.1:1"}, "no token")):
        refused = subprocess.run(
            [FOLDER / "start-worker.sh"], env={**environment, **extra}, capture_output=True, text=True, check=False
        )
        assert refused.returncode != 0
        assert word in refused.stderr


def test_rays_own_parser_accepts_the_cluster_file_and_not_a_misspelt_key() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util", reason="ray is missing")
    config = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
    util.validate_config(util.prepare_config(config))
    config["head_start_ray_command"] = []
    with pytest.raises(Exception, match="head_start_ray_command"):
        util.validate_config(util.prepare_config(config))


@pytest.mark.skipif(not HELMS, reason="helm is missing: make ops-tools")
@pytest.mark.parametrize("shape", ["rayjob-cuda.yaml", "rayjob-rocm.yaml"])
def test_the_rayjob_manifests_are_the_charts(shape: str) -> None:
    parts = ["-s", "templates/job-config.yaml", "-s", "templates/job-rayjob.yaml"]
    done = helm(HELMS[-1], "template", "rl", str(CHART), "-n", "rl-system", "-f", str(CHART / "shapes" / shape), *parts)
    assert done.returncode == 0, done.stderr
    manifest = list(yaml.safe_load_all((FOLDER / shape).read_text()))
    assert [d for d in manifest if d] == [d for d in yaml.safe_load_all(done.stdout) if d]


@dataclass(frozen=True, slots=True)
class Head:
    """A running head node. run: `ray …` with the token and the address of its jobs API."""

    url: str
    folder: Path
    environment: dict[str, str]

    def run(self, *arguments: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BIN / "ray", *arguments],
            env=self.environment, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    pytest.importorskip("ray", reason="ray is missing")
    # Ray's sockets live in this folder, and their paths must be short.
    folder = tmp_path_factory.mktemp("head")
    # Outside of the range that Ray keeps for its workers.
    gcs, dashboard, metrics = [port for port in free_ports(40) if not 10002 <= port <= 19999][:3]
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "GCS_PORT": str(gcs),
        "DASHBOARD_PORT": str(dashboard),
        "METRICS_PORT": str(metrics),
        "TEMP_DIR": str(folder / "ray"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
        # Ray asks this interface; tests must not sample every ten seconds.
        "RAY_metrics_report_interval_ms": "1000",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    script = [
        "env",
        "-u",
        "RAY_ADDRESS",
        str(FOLDER / "start-head.sh"),
        "--num-cpus=2",
        "--object-store-memory=104857600",
    ]
    command = ["env", *(f"{key}={environment[key]}" for key in environment if key not in os.environ or key == "PATH")]
    with running(folder, {"head": [*command, *script]}) as check:
        wait_for_jobs_api(environment["RAY_ADDRESS"], check)
        head = Head(environment["RAY_ADDRESS"], folder, environment)
        # The API answers before the node's agent, which starts the jobs, has come.
        for _ in range(30):
            tried = head.run("job", "submit", "--", "true")
            if tried.returncode == 0:
                break
            assert "No available agent" in tried.stdout + tried.stderr, tried.stderr
            time.sleep(2)
        yield head


def wait_for_jobs_api(url: str, check: Callable[[], None]) -> None:
    for _ in range(600):
        check()
        try:
            urllib.request.urlopen(f"{url}/api/version", timeout=5).close()
        except urllib.error.HTTPError:
            return  # it answers, if only to ask for the token
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"{url} does not answer")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_submit_status_logs_and_metrics_as_rays_users_expect_them(head: Head, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    tree = {
        "run": {"steps": 3, "directory": str(tmp_path / "runs")},
        "model": {"path": str(write_tiny_model(tmp_path / "model"))},
        "task": {"name": "tokens", "prompts_per_step": 2, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4, "max_model_len": 64, "kv_cache_mb": 16},
    }
    config.write_text(yaml.safe_dump(tree))
    entry = ["--", "python", "-m", "services.main", "--config", str(config)]
    submitted = head.run(
        "job", "submit", "--submission-id", "walk", "--no-wait", "--working-dir", str(tmp_path), *entry
    )
    assert submitted.returncode == 0, submitted.stderr
    targets = head.folder / "ray" / "prom_metrics_service_discovery.json"
    addresses = [target for group in json.loads(targets.read_text()) for target in group["targets"]]
    seen: set[str] = set()
    deadline = time.monotonic() + 480
    while (status := head.run("job", "status", "walk").stdout) and not re.search("succeeded|failed|stopped", status):
        assert time.monotonic() < deadline, head.run("job", "logs", "walk").stdout
        for _ in range(10):
            seen |= metric_names(addresses)
            time.sleep(0.5)
    logs = head.run("job", "logs", "walk").stdout
    assert "succeeded" in status, logs
    assert "12 match" in logs
    assert "walk" in head.run("job", "list").stdout
    expected = {"ray_rl_step", "ray_rl_reward", "ray_rl_step_seconds", "ray_rl_response_tokens_total"}
    assert expected | {"ray_rl_weight_version", "ray_rl_audit_records"} <= seen


def metric_names(addresses: list[str]) -> set[str]:
    names: set[str] = set()
    for address in addresses:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                names |= set(re.findall(r"^(ray_rl_\w+)", answer.read().decode(), re.MULTILINE))
        except OSError:
            continue
    return names


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_fails_exits_with_an_error_and_its_reason_is_the_last_line(head: Head, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("run: {stepz: 3}\n")
    done = head.run("job", "submit", "--", "python", "-m", "services.main", "--config", str(bad))
    assert done.returncode != 0
    assert "run.stepz" in done.stdout + done.stderr


@pytest.mark.slow
def test_without_the_token_nobody_submits(head: Head, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("00" * 32)
    stranger = {**head.environment, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    refused = subprocess.run(
        [BIN / "ray", "job", "submit", "--", "true"], env=stranger, capture_output=True, text=True, check=False
    )
    assert refused.returncode != 0
    assert re.search("401|403|[Aa]uth|token", refused.stdout + refused.stderr)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is missing: make ops-tools")
def test_a_real_prometheus_reads_the_nodes_that_ray_writes_down(head: Head, tmp_path: Path) -> None:
    targets = json.loads((head.folder / "ray" / "prom_metrics_service_discovery.json").read_text())
    with running_stack(tmp_path, {"ray": [target for group in targets for target in group["targets"]]}) as stack:
        deadline = time.monotonic() + 60
        while not stack.query("ray_node_cpu_count"):
            assert time.monotonic() < deadline
            time.sleep(0.5)
