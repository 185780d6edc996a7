"""Prometheus, Alertmanager and a pager as processes of this machine, on the project's own configuration.

Only addresses and intervals are changed; rules, routes and inhibitions are the files that an operator deploys.
"""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parents[1] / "prometheus"
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "prometheus": ("prometheus",),
    "alertmanager": ("alertmanager", "prometheus-alertmanager"),
}


class StackError(Exception):
    """A part is missing or does not start."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Base URLs, and the file to which the pager writes one JSON object a notification."""

    prometheus: str
    alertmanager: str
    pages_file: Path

    def pages(self) -> list[dict[str, Any]]:
        """Every notification so far, the oldest first."""
        if not self.pages_file.exists():
            return []
        return [json.loads(line) for line in self.pages_file.read_text("utf-8").splitlines()]

    def firing(self, receiver: str) -> list[dict[str, Any]]:
        """The alerts that `receiver` was told are firing, with `at`, when it was told."""
        return [
            {"at": page["at"], **alert}
            for page in self.pages()
            if page["receiver"] == receiver
            for alert in page["alerts"]
            if alert["status"] == "firing"
        ]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an instant query."""
        answer = self._ask("query", query=expression)
        result: list[dict[str, Any]] = answer["result"]
        return result

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Series of a range query; times are Unix seconds."""
        answer = self._ask("query_range", query=expression, start=start, end=end, step=step)
        result: list[dict[str, Any]] = answer["result"]
        return result

    def _ask(self, path: str, **parameters: Any) -> dict[str, Any]:
        data = urllib.parse.urlencode(parameters).encode()
        with urllib.request.urlopen(f"{self.prometheus}/api/v1/{path}", data, timeout=30) as answer:
            body: dict[str, Any] = json.loads(answer.read())["data"]
        return body


def program(name: str) -> str:
    """Path of `prometheus` or `alertmanager`; StackError says how to get it."""
    for candidate in PROGRAMS[name]:
        if found := shutil.which(candidate):
            return found
    raise StackError(
        f"{name} is not installed; `make ops-tools` installs it (Debian: apt-get install prometheus-alertmanager)"
    )


@contextmanager
def running_stack(
    folder: Path,
    targets: Mapping[str, Sequence[str]],
    files: Mapping[str, Path] | None = None,
    interval: str = "1s",
    retention: str = "2h",
) -> Iterator[Stack]:
    """Start all three; stop them at the end. targets: job name → host:port of each target.

    files: job name → file of targets that may come and change, as Ray writes one.
    folder: for data and logs. interval: of scraping and of evaluating rules.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prometheus, alertmanager, pager = (f"127.0.0.1:{port}" for port in free_ports(3))
    pages = folder / "pages.jsonl"
    _write_configs(folder, targets, files or {}, interval, alertmanager, pager)
    commands = {
        "pager": [sys.executable, str(HERE / "pager.py"), "--listen", pager, "--log", str(pages)],
        "alertmanager": [
            program("alertmanager"),
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'alertmanager'}",
            f"--web.listen-address={alertmanager}",
            "--cluster.listen-address=",
        ],
        "prometheus": [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={prometheus}",
            f"--storage.tsdb.retention.time={retention}",
            # What is sent before Alertmanager is discovered is lost; the default is to say it again a minute later.
            "--rules.alert.resend-delay=5s",
        ],
    }
    with running(folder, commands) as check:
        for address in (alertmanager, prometheus):
            wait_until_ok(f"http://{address}/-/ready", 30, check)
        yield Stack(f"http://{prometheus}", f"http://{alertmanager}", pages)


@contextmanager
def running(folder: Path, commands: Mapping[str, Sequence[str]]) -> Iterator[Callable[[], None]]:
    """Run commands side by side, output to `folder`/NAME.log; yields a check that all still run."""
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def check() -> None:
        for name, process in processes.items():
            if process.poll() is not None:
                lines = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines() or ["no output"]
                raise StackError(f"{name} ended with code {process.returncode}: {lines[-1]}")

    try:
        for name, command in commands.items():
            with (folder / f"{name}.log").open("ab") as output:
                processes[name] = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        yield check
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ok(url: str, seconds: float, check: Callable[[], None] = lambda: None) -> None:
    """Wait until `url` answers 200; StackError after `seconds`. check: called between tries, may raise."""
    deadline = time.monotonic() + seconds
    while True:
        check()
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                raise StackError(f"{url} does not answer after {seconds:.0f} s: {error}") from None
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _write_configs(
    folder: Path,
    targets: Mapping[str, Sequence[str]],
    files: Mapping[str, Path],
    interval: str,
    alertmanager: str,
    pager: str,
) -> None:
    config = yaml.safe_load((HERE / "prometheus.yml").read_text("utf-8"))
    config["global"].update(scrape_interval=interval, evaluation_interval=interval, scrape_timeout=interval)
    config["rule_files"] = [str(HERE / "rules.yml")]
    config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": [alertmanager]}]}]
    config["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": list(addresses), "labels": {"cluster": "local"}}]}
        for job, addresses in targets.items()
    ]
    config["scrape_configs"] += [
        {
            "job_name": job,
            "file_sd_configs": [{"files": [str(file)], "refresh_interval": "2s"}],
            "metric_relabel_configs": [{"target_label": "cluster", "replacement": "local"}],
        }
        for job, file in files.items()
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    routes = (HERE / "alertmanager.yml").read_text("utf-8").replace("pager:9099", pager)
    (folder / "alertmanager.yml").write_text(routes, "utf-8")
