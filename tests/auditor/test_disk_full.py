"""The ledger's disk is full, really, or its file gone: what is acknowledged is stored, and the rest arrives later."""

import os
import resource
import shutil
import sqlite3
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from auditor.client import AuditClient
from auditor.storage.chain import verify
from auditor.storage.database import open_database
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.test_survival import check_totals, submit_pairs

Room = Callable[[bool], None]


@contextmanager
def small_disk(folder: Path) -> Iterator[tuple[AuditorProcess, Room]]:
    """A file system of 16 megabytes; it is filled up and freed by another file on it."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    filler = disk / "filler"

    def room(there: bool) -> None:
        if there:
            filler.unlink()
            return
        with filler.open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    return

    try:
        with running_auditor(folder / "a", "--ledger", str(disk / "ledger.db")) as auditor:
            auditor.ledger = disk / "ledger.db"
            yield auditor, room
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@contextmanager
def small_files(folder: Path) -> Iterator[tuple[AuditorProcess, Room]]:
    """The auditor's process may write no file beyond a size: an error of the disk at every write after it."""
    with running_auditor(folder / "a") as auditor:
        assert auditor.process is not None
        pid = auditor.process.pid

        def room(there: bool) -> None:
            wal = auditor.ledger.with_name(auditor.ledger.name + "-wal")
            limit = resource.RLIM_INFINITY if there else max(wal.stat().st_size, 1 << 14)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        yield auditor, room


@contextmanager
def another_file(folder: Path) -> Iterator[tuple[AuditorProcess, Room]]:
    """Somebody puts a copy in the ledger's place: what is written to the file that was there would be lost with it."""
    with running_auditor(folder / "a") as auditor:
        (folder / "old").mkdir()

        def room(there: bool) -> None:
            if not there:
                with closing(sqlite3.connect(auditor.ledger)) as now, closing(sqlite3.connect(folder / "copy")) as copy:
                    now.backup(copy)
                    copy.execute("PRAGMA journal_mode = DELETE")
            start, end = (folder / "old", auditor.folder) if there else (auditor.folder, folder / "old")
            for file in start.glob("ledger.db*"):
                file.rename(end / file.name)
            if not there:
                (folder / "copy").rename(auditor.ledger)

        yield auditor, room


def readiness(auditor: AuditorProcess) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{auditor.http}/readyz", timeout=10) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_ledger_on_a_disk_that_nobody_may_write_is_verified(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with running_auditor(tmp_path) as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client:
            submit_pairs(client, range(2))
        assert auditor.stop() == 0
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    try:
        shutil.copy(auditor.ledger, disk / "ledger.db")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert verify(open_database(str(disk / "ledger.db"), writer=False)).entries == 6
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize(
    ("disk", "said"),
    [
        (small_disk, "database or disk is full"),
        (small_files, "disk I/O error"),
        (another_file, "is no longer the file that was opened"),
    ],
)
def test_a_disk_that_takes_nothing_acknowledges_nothing_says_so_and_recovers_with_every_record_once(
    tmp_path: Path, disk: Callable[[Path], object], said: str
) -> None:
    with disk(tmp_path) as (auditor, room):  # type: ignore[attr-defined]
        assert readiness(auditor) == (200, "ok\n")
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s", queue_size=128) as client:
            submit_pairs(client, range(20))
            assert client.flush(10).accepted == 40
            room(False)
            slowest, sent = 0.0, 20
            deadline = time.monotonic() + 30
            while client.counts.spooled == 0:
                assert time.monotonic() < deadline, "the disk did not fill up"
                started = time.perf_counter()
                submit_pairs(client, range(sent, sent + 10))
                slowest = max(slowest, (time.perf_counter() - started) / 20)
                sent += 10
                time.sleep(0.02)
            assert slowest < 0.1, "the job goes on"
            status, body = readiness(auditor)
            assert (status, '"code":"ledger_unavailable"' in body) == (503, True), body
            assert "cannot be written" in body
            assert said not in body
            assert str(auditor.folder) not in body
            assert said in (auditor.folder / "auditor.log").read_text(), "who has no token is told no more than that"
            with urllib.request.urlopen(f"http://{auditor.http}/healthz", timeout=5) as answer:
                assert answer.status == 200
            stored = auditor.get("/api/v1/runs/run")["compared_tokens"]
            assert auditor.metrics()['auditor_errors_total{code="ledger_unavailable",part="grpc"}'] >= 1
            room(True)
            while readiness(auditor)[0] != 200:
                assert time.monotonic() < deadline + 30, "it did not become ready again"
                time.sleep(0.1)
            counts = client.flush(30)
            assert (counts.queued, counts.spooled, counts.dropped, counts.refused) == (0, 0, 0, 0)
        assert auditor.get("/api/v1/runs/run")["compared_tokens"] >= stored
        check_totals(auditor, sent)
        assert auditor.stop() == 0
        assert verify(open_database(str(auditor.ledger), writer=False)).entries == 3 * sent
