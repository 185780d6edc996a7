"""A real auditor in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


class AuditorProcess:
    """`python -m auditor.main` on ports that stay the same over restarts.

    python: the interpreter, this one from the checkout by default; another one runs what is installed for it.
    """

    def __init__(self, folder: Path, *flags: str, python: list[str] | None = None) -> None:
        self.folder = folder
        self._python = python or [sys.executable]
        self._cwd = folder if python else REPOSITORY
        self.ledger = folder / "ledger.db"
        self._flags = flags
        self._ports = ("127.0.0.1:0", "127.0.0.1:0")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def grpc(self) -> str:
        return self._ports[0]

    @property
    def http(self) -> str:
        return self._ports[1]

    def start(self) -> None:
        ports = self.folder / "ports.json"
        ports.unlink(missing_ok=True)
        command = [*self._python, "-m", "auditor.main", "--grpc", self.grpc, "--http", self.http]
        command += ["--ledger", str(self.ledger), "--ports-file", str(ports), *self._flags]
        with (self.folder / "auditor.log").open("ab") as output:
            self.process = subprocess.Popen(command, cwd=self._cwd, stdout=output, stderr=output)
        deadline = time.monotonic() + 120
        while not ports.exists():
            assert self.process.poll() is None, (self.folder / "auditor.log").read_text()
            assert time.monotonic() < deadline, "the auditor did not start"
            time.sleep(0.01)
        bound = json.loads(ports.read_text())
        self._ports = (bound["grpc"], bound["http"])

    def kill(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as answer:
            return json.loads(answer.read())

    def metrics(self) -> dict[str, float]:
        """Every series of /metrics, by its name and labels as written there."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    def wait_for_metrics(self, condition: Any, seconds: float = 30) -> dict[str, float]:
        """The series of /metrics once `condition` holds of them."""
        deadline = time.monotonic() + seconds
        while True:
            series = self.metrics()
            if condition(series):
                return series
            assert time.monotonic() < deadline, series
            time.sleep(0.05)

    @property
    def log(self) -> str:
        return (self.folder / "auditor.log").read_text()

    def wait_for(self, path: str, condition: Any, seconds: float = 30) -> Any:
        """The answer at `path` once `condition` holds of it."""
        deadline = time.monotonic() + seconds
        while True:
            answer = self.get(path)
            if condition(answer):
                return answer
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)


@contextmanager
def running_auditor(folder: Path, *flags: str, python: list[str] | None = None) -> Iterator[AuditorProcess]:
    folder.mkdir(parents=True, exist_ok=True)
    auditor = AuditorProcess(folder, *flags, python=python)
    try:
        yield auditor
    finally:
        assert auditor.process is not None
        if auditor.process.poll() is None:
            auditor.kill()
