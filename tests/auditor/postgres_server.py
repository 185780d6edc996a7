"""A real PostgreSQL server for tests, in a folder of its own, gone afterwards."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from auditor.storage.database import Database

Open = Callable[[bool], Database]  # by whether it may write


def find_programs() -> Path | None:
    """The folder with initdb and postgres, or None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True) + ([Path(found).parent] if found else [])
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


class PostgresServer:
    """Runs as the user `postgres` where the tests run as root, for the server refuses root."""

    def __init__(self) -> None:
        programs = find_programs()
        if programs is None:
            pytest.skip("PostgreSQL is missing (initdb, postgres): make ops-tools")
        self._programs = programs
        self._user = "postgres" if os.getuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="pg"))
        if self._user:
            shutil.chown(self.folder, self._user)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [programs / "initdb", "-D", self.folder / "data", "-A", "trust", "-U", "auditor", "-E", "UTF8"]
        subprocess.run(command, user=self._user, check=True, capture_output=True, cwd="/")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://auditor@127.0.0.1:{self.port}/auditor"

    def start(self) -> None:
        settings = [f"port={self.port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}"]
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data")]
        command += [part for setting in settings for part in ("-c", setting)]
        self._process = subprocess.Popen(
            command, user=self._user, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while not self._answers():
            assert time.monotonic() < deadline, "PostgreSQL did not start"
            time.sleep(0.1)

    def kill(self) -> None:
        """As a machine that loses power, as far as a process can."""
        for pid in self._children():
            with suppress(ProcessLookupError):  # a connection's process may just have ended
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop every process of it where it is: connections stay, and nobody answers."""
        for pid in (*self._children(), self._process.pid):
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in (self._process.pid, *self._children()):
            os.kill(pid, signal.SIGCONT)

    def fresh_database(self) -> None:
        for sql in ("DROP DATABASE IF EXISTS auditor WITH (FORCE)", "CREATE DATABASE auditor"):
            self._run(sql)

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _children(self) -> list[int]:
        listed = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def _run(self, sql: str) -> None:
        with psycopg.connect(f"postgresql://auditor@127.0.0.1:{self.port}/postgres", autocommit=True) as connection:
            connection.execute(sql)

    def _answers(self) -> bool:
        try:
            self._run("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True
