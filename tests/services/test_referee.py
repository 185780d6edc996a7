"""The job's own auditor as a process: it starts, is started again on the same ledger and ports, and ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest

from services import referee
from services.errors import AuditorError
from services.referee import OwnAuditor, wait_until_ready


@pytest.fixture
def make_auditor(tmp_path):
    made = []

    def make(*arguments, ports=(0, 0), restart=True):
        ledger = ["--ledger", str(tmp_path / "ledger.sqlite"), "--weights-root", str(tmp_path)]
        made.append(OwnAuditor(tmp_path / "auditor", [*ledger, *arguments], *ports, restart=restart))
        return made[-1]

    yield make
    for auditor in made:
        auditor.stop()


def _wait_until(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_answers_after_start_and_is_gone_after_stop(make_auditor):
    auditor = make_auditor()
    address = auditor.start()
    with urllib.request.urlopen(f"{address.http}/healthz") as answer:
        assert answer.read() == b"ok\n"
    auditor.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(auditor.pid, 0)


def test_it_ends_when_the_job_is_killed(tmp_path):
    job = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from services.referee import OwnAuditor\n"
        "folder = Path(sys.argv[1])\n"
        "auditor = OwnAuditor(folder, ['--ledger', str(folder / 'ledger.sqlite')], 0, 0, restart=True)\n"
        "auditor.start()\n"
        "print(auditor.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", job, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    auditor = int(done.stdout)
    _wait_until(lambda: not psutil.pid_exists(auditor) or psutil.Process(auditor).status() == psutil.STATUS_ZOMBIE)


def test_killed_it_comes_back_at_the_same_address(make_auditor):
    auditor = make_auditor()
    address = auditor.start()
    killed = auditor.pid
    os.kill(killed, signal.SIGKILL)
    _wait_until(lambda: auditor.restarts == 1 and auditor.pid != killed)
    wait_until_ready(address, 20.0)


def test_one_that_cannot_start_any_more_is_given_up_after_some_tries_with_its_reason(
    make_auditor, tmp_path, monkeypatch
):
    monkeypatch.setattr(referee, "_RESTART_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(referee, "_MOST_QUICK_ENDS", 2)
    auditor = make_auditor()
    auditor.start()
    os.kill(auditor.pid, signal.SIGSTOP)
    for file in tmp_path.glob("ledger.sqlite*"):
        file.unlink()
    (tmp_path / "ledger.sqlite").mkdir()
    os.kill(auditor.pid, signal.SIGKILL)
    _wait_until(lambda: auditor.gave_up, seconds=60)
    assert auditor.restarts == 1
    assert (
        "ended 2 times in a row within 10 s, the last time with code 2, and is not started again: " in auditor.gave_up
    )
    assert "ledger.sqlite" in auditor.gave_up
    auditor.stop()


def test_one_that_does_not_end_well_when_it_is_stopped_is_said(make_auditor, caplog):
    auditor = make_auditor(restart=False)
    auditor.start()
    os.kill(auditor.pid, signal.SIGKILL)
    auditor.stop()
    (said,) = [r.getMessage() for r in caplog.records if r.name == "services.referee"]
    assert re.match(r"the auditor ended with code -9: .*ready after", said)


def test_without_restart_it_stays_away(make_auditor):
    auditor = make_auditor(restart=False)
    address = auditor.start()
    os.kill(auditor.pid, signal.SIGKILL)
    with pytest.raises(AuditorError, match=r"is not ready after 1 s: .*[Rr]efused"):
        wait_until_ready(address, 1.0)


def test_a_port_in_use_is_named_with_the_keys_to_change(make_auditor):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AuditorError, match=rf"port {port} is in use; set auditor\.grpc_port"):
            make_auditor(ports=(port, 0)).start()


def test_an_auditor_that_refuses_to_start_is_quoted(make_auditor):
    with pytest.raises(AuditorError, match=r"the auditor ended with code 2: .*recompute_rate"):
        make_auditor("--recompute-rate", "7").start()
