"""The job's own auditor: a separate process, watched, and started again on the same ledger and ports when it dies."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Sequence
from pathlib import Path

from services.auditor_access import AuditorAccess
from services.errors import AuditorError

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_RESTART_PAUSE_SECONDS = 1.0
_STOP_SECONDS = 10.0
# One that ends so soon after its start, so often in a row, cannot do its work; trying on would only hide why.
_QUICK_SECONDS = 10.0
_MOST_QUICK_ENDS = 4


class OwnAuditor:
    """`python -m auditor.main` as a child process in a session of its own, so that Ctrl-C reaches the job first."""

    def __init__(self, folder: Path, arguments: Sequence[str], grpc_port: int, http_port: int, restart: bool) -> None:
        """folder: of ports.json and auditor.log. arguments: passed on. Ports of 0 mean any. Starts nothing yet."""
        self._folder = folder
        self._arguments = tuple(arguments)
        self._ports = (grpc_port, http_port)
        self._restart = restart
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned = 0.0
        self._stopping = threading.Event()
        self._spawning = threading.Lock()
        self.restarts = 0
        self.gave_up = ""  # why it is not started again

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> AuditorAccess:
        """Start it and wait until it answers; AuditorError says why it does not."""
        for port in self._ports:
            _require_free(port)
        self._spawn()
        ports = self._wait_for_ports()
        self._ports = (int(ports["grpc"].rpartition(":")[2]), int(ports["http"].rpartition(":")[2]))
        access = AuditorAccess(f"127.0.0.1:{self._ports[0]}", f"http://127.0.0.1:{self._ports[1]}")
        wait_until_ready(access, _START_SECONDS, self._check_alive)
        if self._restart:
            threading.Thread(target=self._watch, name="auditor-watch", daemon=True).start()
        return access

    def stop(self) -> None:
        """Ask it to end, kill it after ten seconds, and say in the log if it did not end with 0."""
        with self._spawning:
            stopped = self._stopping.is_set()
            self._stopping.set()
            process = self._process
        if process is None or stopped or self.gave_up:
            return
        process.send_signal(signal.SIGTERM)  # nothing, where it has ended
        try:
            code = process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            log.warning("the auditor did not end within %.0f s and was killed: %s", _STOP_SECONDS, self._last_words())
            return
        if code:
            log.warning("the auditor ended with code %s: %s", code, self._last_words())

    def _spawn(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        ports_file = self._folder / "ports.json"
        ports_file.unlink(missing_ok=True)
        grpc, http = self._ports
        command = [sys.executable, "-m", "auditor.main", "--grpc", f"127.0.0.1:{grpc}", "--http", f"127.0.0.1:{http}"]
        self._spawned = time.monotonic()
        with (self._folder / "auditor.log").open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "--ports-file", str(ports_file), "--stop-at-eof", *self._arguments],
                stdout=output,
                stderr=output,
                stdin=subprocess.PIPE,  # nothing is written; its end is how the auditor learns of ours, kill -9 too
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def _wait_for_ports(self) -> dict[str, str]:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            self._check_alive()
            try:
                found: dict[str, str] = json.loads((self._folder / "ports.json").read_text())
                return found
            except (FileNotFoundError, json.JSONDecodeError):
                time.sleep(0.05)
        raise AuditorError(
            f"the auditor said no ports within {_START_SECONDS:.0f} s; see {self._folder / 'auditor.log'}"
        )

    def _check_alive(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise AuditorError(f"the auditor ended with code {code}: {self._last_words()}")

    def _last_words(self) -> str:
        try:
            lines = (self._folder / "auditor.log").read_text(errors="replace").strip().splitlines()
        except OSError as error:
            return str(error)
        return lines[-1] if lines else "no output"

    def _watch(self) -> None:
        quick = 0
        while not self._stopping.is_set():
            assert self._process is not None
            code = self._process.wait()
            quick = quick + 1 if time.monotonic() - self._spawned < _QUICK_SECONDS else 0
            self._stopping.wait(_RESTART_PAUSE_SECONDS)
            with self._spawning:
                if self._stopping.is_set():
                    return
                if quick >= _MOST_QUICK_ENDS:
                    self.gave_up = (
                        f"the auditor ended {quick} times in a row within {_QUICK_SECONDS:.0f} s, the last time with "
                        f"code {code}, and is not started again: {self._last_words()}"
                    )
                    log.error("%s", self.gave_up)
                    return
                log.warning("the auditor ended with code %s; starting it again on the same ledger", code)
                self._spawn()
            self.restarts += 1


def wait_until_ready(access: AuditorAccess, seconds: float, check: Callable[[], None] = lambda: None) -> None:
    """Wait until /readyz says 200; AuditorError after `seconds`. check: called between tries, may raise."""
    deadline = time.monotonic() + seconds
    reason = "no try was made"
    while time.monotonic() < deadline:
        check()
        try:
            with access.get("/readyz", seconds=2.0):
                return
        except urllib.error.HTTPError as error:
            reason = f"it answers {error.code}"
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "reason", error))
        time.sleep(0.1)
    raise AuditorError(f"the auditor at {access.http} is not ready after {seconds:.0f} s: {reason}")


def _require_free(port: int) -> None:
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise AuditorError(
                f"port {port} is in use; set auditor.grpc_port and auditor.http_port to free ports, or to 0 for any"
            ) from None
