"""Server, clients, recompute workers and the database killed at random points, round after round; then all is counted.

AUDITOR_KILL_ROUNDS sets the number of rounds of the soak test (200).
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from auditor.client import AuditClient
from auditor.storage.chain import verify
from auditor.storage.database import open_database
from tests.auditor.postgres_server import PostgresServer
from tests.auditor.processes import REPOSITORY, AuditorProcess, running_auditor
from tests.auditor.samples import RESPONSE
from tests.auditor.test_reference import weights_root

__all__ = ["weights_root"]

# A producer that is killed reports the same samples again when it is started again.
PRODUCER = """
import sys, time
from pathlib import Path
from auditor.client import AuditClient
from tests.auditor.test_reference import true_pair
root, address, spool, first, count = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
with AuditClient(address, "run", spool_dir=spool) as client:
    for i in range(first, first + count):
        rollout, trainer = true_pair(root, str(i))
        client.submit_rollout(rollout)
        client.submit_trainer(trainer)
        time.sleep(0.002)
"""


def produce(root: Path, auditor: AuditorProcess, spool: Path, first: int, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PRODUCER, str(root), auditor.grpc, str(spool), str(first), str(count)]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)


def workers_of(auditor: AuditorProcess) -> list[int]:
    assert auditor.process is not None
    children = Path(f"/proc/{auditor.process.pid}/task/{auditor.process.pid}/children")
    threads = Path(f"/proc/{auditor.process.pid}/task").iterdir()
    listed = [thread / "children" for thread in threads] or [children]
    return [int(pid) for file in listed if file.exists() for pid in file.read_text().split()]


def run_rounds(root: Path, folder: Path, rounds: int, database: PostgresServer | None = None) -> None:
    random = np.random.default_rng(rounds)
    each, spool = 6, folder / "spool"
    victims = ["server", "client", "worker"] + (["database"] if database else [])
    flags = ("--weights-root", str(root), "--recompute-rate", "1")
    flags += ("--ledger", database.url) if database else ()
    with running_auditor(folder / "auditor", *flags) as auditor:
        for number in range(rounds):
            producer = produce(root, auditor, spool, number * each, each)
            time.sleep(float(random.uniform(0.0, 0.6)))
            victim = victims[number] if number < len(victims) else random.choice(victims)
            if victim == "database":
                assert database is not None
                database.kill()
                time.sleep(float(random.uniform(0.0, 0.5)))
                database.start()
            elif victim == "server":
                auditor.kill()
                auditor.start()
            elif victim == "worker":
                for pid in workers_of(auditor):
                    os.kill(pid, signal.SIGKILL)
            else:
                producer.kill()
                producer.wait()
                producer = produce(root, auditor, spool, number * each, each)
            assert producer.wait(60) == 0
        with AuditClient(auditor.grpc, "run", spool_dir=spool) as late:
            assert late.flush(60).spooled == 0
        samples = rounds * each
        run = auditor.wait_for("/api/v1/runs/run", lambda r: r["queued"] == 0 and r["samples"] == samples, 120)
        assert run["by_verdict"] == {"match": samples}
        assert run["by_reference"] == {"done": samples}
        assert run["compared_tokens"] == run["recomputed_tokens"] == samples * RESPONSE
        metrics = auditor.metrics()
        assert metrics['auditor_compared_tokens_total{run_id="run"}'] == samples * RESPONSE
        assert metrics['auditor_recomputed_tokens_total{mma="fma32",run_id="run"}'] == samples * RESPONSE
        for side in ("rollout", "trainer"):
            assert metrics[f'auditor_records_total{{outcome="accepted",run_id="run",side="{side}"}}'] == samples
        assert auditor.stop() == 0
        # Two records and a verdict a sample, and one more verdict when the reference has spoken.
        ledger = database.url if database else str(auditor.ledger)
        assert verify(open_database(ledger, writer=False)).entries == 4 * samples


def test_five_rounds_of_kills_lose_nothing_and_count_nothing_twice(weights_root: Path, tmp_path: Path) -> None:
    run_rounds(weights_root, tmp_path, 5)


def test_five_rounds_of_kills_with_the_database_among_them_lose_nothing(
    weights_root: Path, tmp_path: Path, postgres: PostgresServer
) -> None:
    postgres.fresh_database()
    run_rounds(weights_root, tmp_path, 5, postgres)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_two_hundred_rounds_of_kills_with_the_database_among_them_lose_nothing(
    weights_root: Path, tmp_path: Path, postgres: PostgresServer
) -> None:
    postgres.fresh_database()
    run_rounds(weights_root, tmp_path, int(os.environ.get("AUDITOR_KILL_ROUNDS", "200")), postgres)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_rounds_of_kills_lose_nothing_and_count_nothing_twice(weights_root: Path, tmp_path: Path) -> None:
    run_rounds(weights_root, tmp_path, int(os.environ.get("AUDITOR_KILL_ROUNDS", "200")))
