"""A Ray cluster as deploy/ray starts it, and a job walked through as Ray's users do: submit, status, logs, metrics."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.render import expand
from deploy.tour.stack import Stack, free_ports, running_stack
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.deploy.test_helm import CHART, HELMS, helm
from tests.deploy.watched import label_values
from tests.docs.commands import OPERATIONS, blocks, running_script, workplace
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
class Walk:
    """The commands of docs/operations/operate.md, run on a head node that still runs, and watched by Prometheus.

    said: what the commands printed. span: Unix seconds from before to after them.
    """

    folder: Path
    environment: dict[str, str]
    said: str
    stack: Stack
    span: tuple[float, float]

    def ray(self, *arguments: str, **other: str) -> subprocess.CompletedProcess[str]:
        """`ray …` with the token and the address of its jobs API. other: changes to the environment."""
        return subprocess.run(
            [BIN / "ray", *arguments],
            env={**self.environment, **other}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    def series(self, expression: str) -> list[dict[str, Any]]:
        """What a panel over the whole walk shows."""
        return self.stack.query_range(expression, *self.span, 1)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    pytest.importorskip("ray", reason="ray is missing")
    if not shutil.which("prometheus"):
        pytest.skip("prometheus is missing: make ops-tools")
    folder = workplace(tmp_path_factory.mktemp("walk"))
    # Outside of the range that Ray keeps for its workers.
    gcs, dashboard, metrics, agent = [port for port in free_ports(40) if not 10002 <= port <= 19999][:4]
    with ExitStack() as parts:
        # Ray's sockets live there, and their paths must be short.
        short = parts.enter_context(tempfile.TemporaryDirectory(prefix="rd"))
        environment = {
            "GCS_PORT": str(gcs),
            "METRICS_PORT": str(metrics),
            "DASHBOARD_PORT": str(dashboard),
            "AGENT_PORT": str(agent),
            "TEMP_DIR": f"{short}/ray",
            "RAY_AUTH_TOKEN_PATH": f"{short}/token",
            # Ray asks this interface; tests must not sample every ten seconds.
            "RAY_metrics_report_interval_ms": "1000",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        auditor = parts.enter_context(running_auditor(folder / "auditor-data"))
        targets = Path(short) / "ray" / "prom_metrics_service_discovery.json"
        stack = parts.enter_context(running_stack(folder / "stack", {"auditor": [auditor.http]}, {"ray": targets}))
        tiny_demo(folder, auditor)
        code = "".join(block.code for page in OPERATIONS for block in blocks(page) if block.need == "ray")
        code = code.replace(":8265", f":{dashboard}")
        began = time.time()
        # Ray takes twenty seconds to stop when all its processes are told to at once; nobody needs what it would save.
        said = parts.enter_context(running_script(code, folder, environment, grace_s=1)).finish(300)
        user = {**os.environ, **environment, "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}", "RAY_AUTH_MODE": "token"}
        yield Walk(folder, user, said, stack, (began, time.time()))


def tiny_demo(folder: Path, auditor: AuditorProcess) -> None:
    """The demo's config, on a tiny model, with an auditor that runs already."""
    (folder / "deploy/configs").unlink()
    (folder / "deploy/configs").mkdir()
    tree = {
        "run": {"steps": 4, "directory": str(folder / "runs")},
        "model": {"path": str(write_tiny_model(folder / "model"))},
        "task": {"name": "tokens", "prompts_per_step": 2, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 16, "max_model_len": 64, "kv_cache_mb": 16},
        "weights": {"directory": str(folder / "weights")},
        "auditor": {"grpc": auditor.grpc, "http": f"http://{auditor.http}"},
    }
    (folder / "deploy/configs/demo.yaml").write_text(yaml.safe_dump(tree))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_submit_status_logs_and_metrics_are_as_rays_users_expect_them(walk: Walk) -> None:
    submitted, status = walk.said.find("Job 'first' succeeded"), walk.said.rfind("Job 'first' succeeded")
    assert 0 <= submitted < status, walk.said
    # Once while it runs and once from its log.
    assert walk.said.count("16 match") == 2, walk.said
    assert "first" in walk.ray("job", "list").stdout
    names = {one["metric"]["__name__"] for one in walk.series('{__name__=~"ray_rl_.*"}')}
    expected = {"ray_rl_step", "ray_rl_reward", "ray_rl_step_seconds", "ray_rl_response_tokens_total"}
    assert names >= expected | {"ray_rl_weight_version", "ray_rl_audit_records"}
    assert walk.series("ray_node_cpu_count")


@pytest.mark.slow
def test_every_panel_and_variable_of_the_jobs_dashboard_has_something_to_show_for_it(walk: Walk) -> None:
    dashboard = json.loads((REPOSITORY / "deploy/grafana/dashboards/rl_job.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert [e for e in asked if not walk.series(expand(e, {}, "5s"))] == []
    variables = {each["name"]: each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"}
    (session,) = label_values(walk.stack, variables["SessionName"], Cluster="local")
    assert session.startswith("session_")
    assert label_values(walk.stack, variables["SessionName"], Cluster="elsewhere") == set()
    assert label_values(walk.stack, variables["Cluster"]) == {"local"}
    assert len(label_values(walk.stack, variables["run"], Cluster="local")) == 1


@pytest.mark.slow
def test_a_job_that_fails_exits_with_an_error_and_its_reason_is_the_last_line(walk: Walk, tmp_path: Path) -> None:
    """From a folder that is sent along, with the token in the environment. It is one for GPUs; the cluster has none."""
    shutil.copyfile(walk.folder / "deploy/configs/demo.yaml", tmp_path / "bad.yaml")
    token = (Path(walk.environment["RAY_AUTH_TOKEN_PATH"])).read_text().strip()
    command = ["job", "submit", "--working-dir", str(tmp_path), "--", "python", "-m", "services.main"]
    command += ["--config", "bad.yaml", "--set", "numerics.profile=sm90"]
    done = walk.ray(*command, RAY_AUTH_TOKEN=token, RAY_AUTH_TOKEN_PATH=str(tmp_path / "none"))
    assert done.returncode != 0
    assert "error: the Ray cluster has 0 GPUs and this job needs 1, since numerics.profile" in done.stdout + done.stderr


@pytest.mark.slow
def test_without_the_token_nobody_submits(walk: Walk, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("00" * 32)
    refused = walk.ray("job", "submit", "--", "true", RAY_AUTH_TOKEN_PATH=str(tmp_path / "token"))
    assert refused.returncode != 0
    assert re.search("401|403|[Aa]uth|token", refused.stdout + refused.stderr)
