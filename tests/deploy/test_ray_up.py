"""`ray up deploy/ray/cluster.yaml` on two hosts that are reached by ssh, a job over both of them, and `ray down`."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.hosts import Host, hosts
from tests.deploy.watched import wait_for
from tests.models import write_tiny_model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
REPOSITORY = Path(__file__).parents[2]
FILE = REPOSITORY / "deploy" / "ray" / "cluster.yaml"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Host]]:
    pytest.importorskip("ray", reason="ray is missing")
    shared = tmp_path / "shared"
    shared.mkdir()
    with hosts(tmp_path, shared, ["desk", "head", "gpu-0"]) as made:
        yield made


def test_a_cluster_comes_up_on_hosts_of_ones_own_runs_a_job_over_them_and_goes(
    three: list[Host], tmp_path: Path
) -> None:
    desk, head, worker = three
    config = yaml.safe_load(FILE.read_text())
    # What its comment tells one to put in.
    config["provider"].update(head_ip=head.address, worker_ips=[worker.address])
    config["auth"]["ssh_user"] = "root"
    (tmp_path / "shared/cluster.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "shared/job.yaml").write_text(yaml.safe_dump(job(tmp_path / "shared", desk.address)))
    said(desk, "mkdir -p ~/.ray && (umask 077 && openssl rand -hex 32 > ~/.ray/auth_token)")
    began = time.monotonic()
    said(desk, "RAY_UP_enable_autoscaler_v2=0 ray up -y /mnt/cluster.yaml")
    alive = 'python -c \'import ray; ray.init(); print("hosts", sum(n["Alive"] for n in ray.nodes()))\''
    asked = f"export RAY_AUTH_MODE=token RAY_ADDRESS=http://{head.address}:8265; ray job submit -- "
    while "hosts 2" not in (answer := desk.run(asked + alive).stdout):
        monitor = head.run("tail -n 40 /tmp/ray/session_latest/logs/monitor.*").stdout
        assert time.monotonic() - began < 120, answer + monitor
    print(f"two hosts after {time.monotonic() - began:.0f} s")
    # The auditor that a job starts for itself is on loopback, where no other host reaches it.
    auditor = f"python -m auditor.main --grpc {desk.address}:50051 --http {desk.address}:9464 --insecure"
    said(desk, f"(setsid {auditor} --ledger ~/ledger.db > ~/auditor.log 2>&1 < /dev/null &)")
    said(desk, f"curl -fsS --retry 30 --retry-connrefused --retry-delay 1 http://{desk.address}:9464/readyz")
    done = said(desk, f"{asked} python -m services.main --config /mnt/job.yaml")
    assert "succeeded" in done
    assert "4 match" in done
    said(desk, "ray down -y /mnt/cluster.yaml")
    for host in (head, worker):
        # A raylet may take its time to stop.
        wait_for(lambda host=host: "raylet" not in host.run("ps -e -o comm").stdout, 60)


def said(host: Host, command: str) -> str:
    done = host.run(command)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def job(shared: Path, auditor: str) -> dict[str, object]:
    """A job whose folders are seen by all hosts under one path."""
    write_tiny_model(shared / "model")
    return {
        "run": {"steps": 1, "directory": "/mnt/runs"},
        "model": {"path": "/mnt/model"},
        "weights": {"directory": "/mnt/weights"},
        "task": {"name": "tokens", "prompts_per_step": 2, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4, "max_model_len": 64, "kv_cache_mb": 16},
        "auditor": {"grpc": f"{auditor}:50051", "http": f"http://{auditor}:9464"},
    }
