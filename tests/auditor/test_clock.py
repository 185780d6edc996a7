"""The machine's clock is set, forwards and backwards, while the auditor runs and between two runs of it."""

import struct
import threading
import time
from pathlib import Path

import pytest

from auditor.client import AuditClient
from auditor.clock import SteadyClock
from auditor.codec import encode
from auditor.contracts import known_contracts
from auditor.export.board import Board
from auditor.pipeline import Incoming, Pipeline
from auditor.retention import Retirement
from auditor.sampling import Rate
from auditor.storage.chain import verify
from auditor.storage.database import open_database
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from auditor.writer import Writer
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import pair
from tests.auditor.test_survival import check_totals, submit_pairs

DAY = 86_400.0
# The machine's clock of one process: what time.time gives, moved by the seconds in a file that the test writes. Not for
# gRPC, which hands it on to the kernel, whose clock stands.
MOVED = """
import mmap, os, struct, sys, time
_file = open(os.environ["CLOCK_OFFSET"], "rb")
_offset = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
_time, _time_ns = time.time, time.time_ns
def _moved():
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return 0.0 if caller.startswith("grpc") else struct.unpack("<d", _offset[:8])[0]
time.time = lambda: _time() + _moved()
time.time_ns = lambda: _time_ns() + int(1e9 * _moved())
"""


def test_a_steady_clock_follows_no_jump_and_says_how_far_it_was() -> None:
    wall, steady = [1000.0], [50.0]
    clock = SteadyClock(lambda: wall[0], lambda: steady[0])
    steady[0] += 10
    wall[0] += 10
    assert (clock(), clock.jumped_seconds) == (1010.0, 0.0)
    wall[0] += 40 * DAY
    assert (clock(), clock.jumped_seconds) == (1010.0, 40 * DAY)
    wall[0] -= 80 * DAY
    steady[0] += 5
    wall[0] += 5
    assert (clock(), clock.jumped_seconds) == (1015.0, -40 * DAY)


class Machine:
    """Processes started while this lives see its clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self._offset = folder / "offset"
        self.set(0.0)
        (folder / "sitecustomize.py").write_text(MOVED)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setenv("CLOCK_OFFSET", str(self._offset))

    def set(self, seconds: float) -> None:
        if not self._offset.exists():
            self._offset.write_bytes(bytes(8))
        with self._offset.open("r+b") as file:
            file.write(struct.pack("<d", seconds))


def seen(auditor: AuditorProcess) -> tuple[float, float]:
    """How far the clock was set as the auditor says, and the stamp of the newest record."""
    metrics = auditor.metrics()
    stamp = 'auditor_last_record_timestamp_seconds{run_id="run",side="rollout"}'
    return metrics["auditor_clock_jumped_seconds"], metrics[stamp]


def test_a_clock_set_while_it_runs_loses_nothing_counts_nothing_twice_and_retires_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path / "machine", monkeypatch)
    flags = ("--retain-days", "30", "--retain-look-s", "0.05")
    with running_auditor(tmp_path / "a", *flags) as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client:
            last = 0.0
            for number, days in enumerate((0, 40, -400, 3650, 0)):
                machine.set(days * DAY)
                submit_pairs(client, range(10 * number, 10 * number + 10))
                assert client.flush(10).accepted == 20 * (number + 1)
                time.sleep(0.2)
                jumped, stamp = seen(auditor)
                assert abs(jumped - days * DAY) < 1.0
                assert last <= stamp < time.time() + 1.0
                last = stamp
        check_totals(auditor, 50)
        assert auditor.metrics().get("auditor_retired_records_total", 0.0) == 0.0
        assert auditor.get("/api/v1/runs/run/samples/0/0")["rollout"] is not None
        assert auditor.stop() == 0
        assert verify(open_database(str(auditor.ledger), writer=False)).entries == 150


@pytest.mark.parametrize("days", [40, 3650, -400])
def test_a_clock_that_is_wrong_at_a_start_retires_nothing_then_or_when_it_is_right_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float
) -> None:
    machine = Machine(tmp_path / "machine", monkeypatch)
    flags = ("--retain-days", "30", "--retain-look-s", "0.05")
    with running_auditor(tmp_path / "a", *flags) as auditor:
        for number, wrong in enumerate((0.0, days, 0.0)):
            machine.set(wrong * DAY)
            if number:
                assert auditor.stop() == 0
                auditor.start()
            with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client:
                submit_pairs(client, range(10 * number, 10 * number + 10))
                assert client.flush(10).accepted == 20
            time.sleep(0.3)
        check_totals(auditor, 30)
        assert auditor.metrics().get("auditor_retired_records_total", 0.0) == 0.0


def test_what_is_really_old_is_retired_all_the_same(tmp_path: Path) -> None:
    """And a record that stands behind a younger one is not, whatever its own stamp says."""
    now, path = [1000 * DAY], str(tmp_path / "ledger.db")
    ledger = Ledger(open_database(path, writer=True), lambda: now[0])
    flow = Pipeline(known_contracts(), Rate(0.0), Board(), None)

    def receive(sample: str) -> None:
        with ledger.transaction() as unit:
            flow.receive(unit, [Incoming(record, encode(record)) for record in pair(sample)])

    stamps = {"old": 1000, "young": 1029, "stamped-wrongly": 500, "last": 1029.2}
    for sample, stamp in stamps.items():
        now[0] = stamp * DAY
        receive(sample)
    now[0] = 1029.5 * DAY
    reader = Reader(lambda: open_database(path, writer=False))
    writer = Writer(ledger, lambda counts: None, lambda: None, 8)
    Retirement(reader, writer, 20.0, None, lambda: now[0], threading.Event()).look()
    writer.close()
    held = reader.database.all("SELECT DISTINCT sample_id FROM records WHERE payload IS NOT NULL ORDER BY sample_id")
    assert held == [("last",), ("stamped-wrongly",), ("young",)]
    ledger.close()
