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
from tests.auditor.test_reference import settled, weights_root

__all__ = ["weights_root"]

SIDES = ("pair", "trainer")
EACH = 6
# A producer that is killed reports the same samples again when it is started again. The last one of each round, a step
# of its own, is off by a bit, so that there are searches for causes to be killed.
PRODUCER = f"""
import sys, time
from dataclasses import replace
from pathlib import Path
from auditor.client import AuditClient
from tests.auditor.samples import one_ulp_off
from tests.auditor.test_reference import true_pair
root, address, spool, first, count = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
with AuditClient(address, "run", spool_dir=spool) as client:
    for i in range(first, first + count):
        rollout, trainer = (replace(record, step=i // {EACH}) for record in true_pair(root, str(i)))
        trainer = one_ulp_off(trainer) if i % {EACH} == {EACH - 1} else trainer
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
    spool = folder / "spool"
    victims = ["server", "client", "worker"] + (["database"] if database else [])
    flags = ("--weights-root", str(root), "--recompute-rate", "1")
    flags += ("--ledger", database.url) if database else ()
    with running_auditor(folder / "auditor", *flags) as auditor:
        for number in range(rounds):
            producer = produce(root, auditor, spool, number * EACH, EACH)
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
                producer = produce(root, auditor, spool, number * EACH, EACH)
            assert producer.wait(60) == 0
        with AuditClient(auditor.grpc, "run", spool_dir=spool) as late:
            assert late.flush(60).spooled == 0
        samples = rounds * EACH
        run = auditor.wait_for("/api/v1/runs/run", lambda r: settled(r) and r["samples"] == samples, 120)
        assert run["by_verdict"] == {"match": samples - rounds, "mismatch": rounds}
        assert (run["by_reference"], run["by_side"]) == ({"done": samples}, {"trainer": rounds})
        named = rounds - run["by_cause"].get("undiagnosed", 0)
        assert run["compared_tokens"] == run["recomputed_tokens"] == samples * RESPONSE
        metrics = auditor.metrics()
        assert metrics['auditor_compared_tokens_total{run_id="run"}'] == samples * RESPONSE
        assert metrics['auditor_recomputed_tokens_total{mma="fma32",run_id="run"}'] == samples * RESPONSE
        found = {series: n for series, n in metrics.items() if series.startswith("auditor_mismatched_")}
        assert sum(n for series, n in found.items() if series.startswith("auditor_mismatched_samples")) == rounds
        assert {found[f'auditor_mismatched_tokens_total{{run_id="run",side="{side}"}}'] for side in SIDES} == {rounds}
        for side in ("rollout", "trainer"):
            assert metrics[f'auditor_records_total{{outcome="accepted",run_id="run",side="{side}"}}'] == samples
            waits = [metrics[f'auditor_{name}_pairs{{run_id="run",side="{side}"}}'] for name in ("missing", "overdue")]
            assert waits == [0, 0], "whatever became of an answer to a commit"
        assert metrics['auditor_step{run_id="run"}'] == rounds - 1
        assert auditor.stop() == 0
        reader = open_database(database.url if database else str(auditor.ledger), writer=False)
        searched = reader.all("SELECT sample_id FROM verdicts WHERE body LIKE ?", ('%"cause": "searching"%',))
        assert len(set(searched)) == len(searched) >= named > 0, "searched for once, however often it was killed"
        # Two records and a verdict a sample, one more when the reference has spoken, and one after a search.
        assert verify(reader).entries == 4 * samples + len(searched)
        print(f"{rounds} rounds, {samples} samples, causes {run['by_cause']}, {len(searched)} searched for")


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
