"""The pages' commands that need Docker or the network, as they stand, against a Docker daemon of the test's own.

Changed for this machine: builds use its network, the bases are stand-ins of the same name made from Debian's packages
(tests/deploy/docker_host.py), Megatron-core is that of Python 3.11, and Grafana, which has no stand-in, is left out.
"""

import json
import re
import shutil
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.tour.stack import wait_until_ok
from tests.deploy.docker_host import (
    ACCELERATOR_IMAGE,
    ALERTMANAGER_IMAGE,
    PROMETHEUS_IMAGE,
    PYTHON_IMAGE,
    Docker,
    docker_host,
)
from tests.docs.commands import OPERATIONS, REPOSITORY, blocks, run_script
from tests.models import write_tiny_model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
# The job's container reaches no package index, so the model is put into its volume beforehand.
MODEL = (
    "from pathlib import Path; from services.models import ensure_model; "
    "ensure_model('smollm2-135m-instruct', Path('/models'))"
)


def code(need: str) -> str:
    return "".join(block.code for page in OPERATIONS for block in blocks(page) if block.need == need)


@pytest.fixture(scope="module")
def docker() -> Iterator[Docker]:
    with tempfile.TemporaryDirectory(prefix="dk") as folder, docker_host(Path(folder)) as docker:
        docker.stand_in("python", PYTHON_IMAGE)
        yield docker


def test_the_packages_install_from_the_checkout(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    script = "python -m venv fresh && . fresh/bin/activate\n" + code("network")
    said = run_script(script + "cd fresh && python -m auditor.main --help\n", folder, seconds=900)
    assert "--ledger" in said
    assert not list(folder.glob("fresh/lib/python*/site-packages/torch")), "the auditor needs no torch"


def test_the_images_are_built_by_the_commands_of_the_page_and_run(docker: Docker, tmp_path: Path) -> None:
    docker.stand_in("accelerator", ACCELERATOR_IMAGE)
    lines = [line for line in code("docker").splitlines() if line.startswith("docker build ")]
    assert len(lines) == 3
    for line in lines:
        words = line.replace("YOUR_VLLM_ROCM_IMAGE", ACCELERATOR_IMAGE).split()[2:]
        extra = ["--network=host", *(["--build-arg", "MEGATRON_VERSION=0.16.1"] if "auditor" not in line else [])]
        docker("build", *extra, *words[:-1], str(REPOSITORY))
    base = int(docker("image", "inspect", "-f", "{{.Size}}", ACCELERATOR_IMAGE))
    model = write_tiny_model(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tiny_job()))
    for kind in ("cuda", "rocm"):
        image = f"rl-kernel-job-{kind}:0.1.0"
        size = int(docker("image", "inspect", "-f", "{{.Size}}", image))
        print(f"the job's image for {kind}: {(size - base) / 1e6:.0f} MB over its base of {base / 1e6:.0f} MB")
        assert docker("run", "--rm", "--network=none", "--entrypoint=id", image, "-u").strip() == "65532"
        assert "rollout.tp_size" in docker("run", "--rm", "--network=none", image)
        mounts = [f"--volume={model}:/model:ro", f"--volume={tmp_path}/job.yaml:/job.yaml:ro"]
        said = docker(
            *("run", "--rm", "--network=none", "--shm-size=1g", *mounts, image),
            *("python3", "-m", "services.main", "--config", "/job.yaml"),
        )
        assert "4 match" in said, said[-3000:]


def tiny_job() -> dict[str, Any]:
    return {
        "run": {"steps": 1, "directory": "/tmp/runs"},
        "model": {"path": "/model"},
        "task": {"name": "tokens", "prompts_per_step": 2, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4, "max_model_len": 64, "kv_cache_mb": 16},
    }


@pytest.mark.parametrize("tokens", [False, True], ids=["loopback", "tokens"])
def test_compose_comes_up_and_its_job_is_judged_scraped_and_watched(
    docker: Docker, tmp_path: Path, tokens: bool
) -> None:
    docker.stand_in("prometheus", PROMETHEUS_IMAGE)
    docker.stand_in("alertmanager", ALERTMANAGER_IMAGE)
    folder = compose_folder(tmp_path)
    up, job, logs = (line for line in code("docker").splitlines() if line.startswith("docker compose "))
    token = make_tokens(folder) if tokens else None
    build = "docker compose -f deploy/compose.yaml build -q job"
    script = "\n".join((up, build, MODEL_INTO_VOLUME, job, logs))
    if tokens:
        script = script.replace("-f deploy/compose.yaml", "-f deploy/compose.yaml -f deploy/compose.tokens.yaml")
    script = script.replace("logs -f", "logs")
    down = "docker compose -f deploy/compose.yaml down --volumes --timeout 40"
    try:
        said = run_script(script, folder, docker.environment, seconds=3000)
        assert re.search(r"tokens that differ +0 ", said), said[-4000:]
        assert "[heartbeat] FIRING Watchdog" in said
        wait_until_ok("http://127.0.0.1:9464/readyz", 10)
        for file in (REPOSITORY / "auditor/export/page").iterdir():
            wait_until_ok(f"http://127.0.0.1:9464/page/{file.name}", 10)
        (run,) = ask("http://127.0.0.1:9464/api/v1/runs", token)["runs"]
        assert run["by_verdict"] == {"match": 320}
        assert run["run_id"].startswith("policy.") is tokens
        for expression in ('up{job="auditor"} == 1', "auditor_compared_tokens_total", "max_over_time(ray_rl_step[1h])"):
            wait_for(lambda expression=expression: prometheus(expression))
        assert {target["labels"]["alertname"] for target in ask("http://127.0.0.1:9093/api/v2/alerts")} == {"Watchdog"}
    finally:
        run_script(down, folder, docker.environment, seconds=300)


MODEL_INTO_VOLUME = f"""
docker run --rm --network=host -v deploy_models:/models --entrypoint python rl-kernel-job-cpu:0.1.0 -c "{MODEL}"
"""


def copied(folder: Path) -> Path:
    """What is packed of the repository, as a copy in which things may be built."""
    for name in ("auditor", "services", "rl_kernel", "deploy"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md"):
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


def compose_folder(folder: Path) -> Path:
    """The repository with a compose.yaml whose builds have a network and which has no Grafana."""
    copied(folder)
    file = folder / "deploy/compose.yaml"
    tree = yaml.safe_load(file.read_text())
    del tree["services"]["grafana"]
    for service in tree["services"].values():
        if "build" in service:
            service["build"]["network"] = "host"
    file.write_text(yaml.safe_dump(tree))
    return folder


def make_tokens(folder: Path) -> str:
    """deploy/secrets as the page on security makes it; the token that opens every run."""
    (page,) = (page for page in OPERATIONS if page.stem == "security")
    lines = "".join(block.code for block in blocks(page) if "token" in block.code)
    kept = re.sub(r"^(?:python -m auditor|curl|test|kill) .*\n", "", lines, flags=re.MULTILINE)
    run_script(kept, folder)
    return (folder / "deploy/secrets/token").read_text().strip()


def ask(url: str, token: str | None = None) -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return json.loads(answer.read())


def prometheus(expression: str) -> Any:
    query = urllib.parse.urlencode({"query": expression})
    return ask(f"http://127.0.0.1:9090/api/v1/query?{query}")["data"]["result"]


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.5)
