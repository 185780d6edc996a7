"""What the auditor takes and what it costs: `python -m tests.bench.auditor_bench [PART …] [--json FILE]`.

receive: token pairs a second in batches of records of 4,096 tokens, latency of receipts, memory; the machine's own
limits beside it. query: one step out of a ledger of 10 million samples. start: seconds to ready, memory when idle.
producer: what reporting 100,000 tokens a second costs the process that makes them. Ledgers go to a temporary folder.
"""

import argparse
import hashlib
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from auditor.client import AuditClient
from auditor.codec import encode
from auditor.contracts import known_contracts
from auditor.export.board import Board
from auditor.pipeline import Incoming, Pipeline
from auditor.sampling import Rate
from auditor.storage.database import open_database
from auditor.storage.ledger import Ledger
from tests.auditor.processes import REPOSITORY, AuditorProcess, running_auditor
from tests.auditor.samples import pair

Result = dict[str, Any]
PAIRS_GOAL, P99_GOAL_MS = 3_000_000, 250.0
QUERY_GOAL_MS, SAMPLES, PER_STEP = 50.0, 10_000_000, 512
START_GOAL_S, IDLE_GOAL_MB = 2.0, 300.0
COST_GOAL = 1.01


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
    return kib / 1024


def receive(folder: Path, seconds: float) -> Result:
    """Both sides of a sample in one batch, and each in batches of its own, as from two processes."""
    parts = {
        name: _receive(folder / name, seconds, flags) for name, flags in (("together", []), ("apart", ["--apart"]))
    }
    return parts | {"limits": _limits(folder), "ok": all(part["ok"] for part in parts.values())}


def _receive(folder: Path, seconds: float, flags: list[str]) -> Result:
    """One auditor, one load program, two streams; on two cores they share them."""
    folder.mkdir()
    with running_auditor(folder) as auditor:
        assert auditor.process is not None
        pid, peak, done = auditor.process.pid, [0.0], threading.Event()
        watch = threading.Thread(target=lambda: _watch(pid, peak, done))
        watch.start()
        command = [sys.executable, "-m", "auditor.load", "--address", auditor.grpc]
        command += ["--seconds", str(seconds), "--batch", "8", "--tokens", "4096", "--streams", "2", *flags]
        output = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
        done.set()
        watch.join()
        found: Result = json.loads(output)
        found["auditor_cpu_seconds_per_million_pairs"] = round(
            _cpu_seconds(pid) / (found["token_pairs_per_second"] * found["seconds"] / 1e6), 3
        )
    found["resident_mb"] = round(peak[0])
    return found | {"ok": found["token_pairs_per_second"] >= PAIRS_GOAL and found["receipt_p99_ms"] < P99_GOAL_MS}


def _watch(pid: int, peak: list[float], done: threading.Event) -> None:
    while not done.wait(0.2):
        peak[0] = max(peak[0], resident_mb(pid))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _limits(folder: Path) -> Result:
    """What no program could pass on this machine: bytes hashed and bytes written and synced, as pairs a second."""
    content = bytes(32 << 20)
    begun = time.perf_counter()
    hashlib.sha256(content).digest()
    hashing = len(content) / (time.perf_counter() - begun)
    path = folder / "floor"
    begun = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(8):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    writing = 8 * len(content) / (time.perf_counter() - begun)
    path.unlink()
    # A pair of tokens is 12 bytes on the wire and in the ledger; the write-ahead log is written and copied once more.
    return {
        "sha256_pairs_per_second": round(hashing / 12),
        "disk_pairs_per_second": round(writing / 24),
    }


def query(folder: Path, samples: int) -> Result:
    """Steps at random out of the middle of a large ledger, over HTTP, with nothing of it in the auditor's memory."""
    path = folder / "ledger.db"
    begun = time.perf_counter()
    fill_ledger(path, samples)
    built = time.perf_counter() - begun
    with running_auditor(folder) as auditor:
        steps = np.random.default_rng(0).integers(0, samples // PER_STEP, 200)
        paths = {
            "one step": lambda step: f"/api/v1/runs/large/steps/{step}",
            "its first 100 samples": lambda step: f"/api/v1/runs/large/steps/{step}/samples?limit=100",
            "its mismatches": lambda step: f"/api/v1/runs/large/steps/{step}/samples?verdict=mismatch",
            "one sample": lambda step: f"/api/v1/runs/large/samples/{step}/{step * PER_STEP:09d}",
        }
        found = {name: _milliseconds(auditor, [make(int(step)) for step in steps]) for name, make in paths.items()}
        run = _milliseconds(auditor, ["/api/v1/runs/large"] * 5)
    return {
        "samples": samples,
        "ledger_gb": round(path.stat().st_size / 1e9, 2),
        "seconds_to_build": round(built, 1),
        "milliseconds": found,
        "run_milliseconds": run,
        "ok": found["one step"]["max"] < QUERY_GOAL_MS,
    }


def _milliseconds(auditor: AuditorProcess, paths: list[str]) -> dict[str, float]:
    taken = []
    for path in paths:
        begun = time.perf_counter()
        with urllib.request.urlopen(f"http://{auditor.http}{path}", timeout=60) as answer:
            answer.read()
        taken.append((time.perf_counter() - begun) * 1e3)
    p50, p99 = (float(np.quantile(taken, q)) for q in (0.5, 0.99))
    return {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(max(taken), 2)}


def fill_ledger(path: Path, samples: int) -> None:
    """A ledger as a long run leaves it with its content retired: one real sample, written `samples` times by SQL."""
    ledger = Ledger(open_database(str(path), writer=True))
    with ledger.transaction() as unit:
        flow = Pipeline(known_contracts(), Rate(0.0), Board(), None)
        flow.receive(unit, [Incoming(record, encode(record)) for record in pair("seed", run_id="seed")])
    ledger.close()
    with sqlite3.connect(path, isolation_level=None) as database:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -500000"):
            database.execute(f"PRAGMA {pragma}")
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {samples - 1})"
        name = f"i / {PER_STEP}, printf('%09d', i)"
        for statement in (
            f"{numbers} INSERT INTO samples SELECT 'large', {name}, verdict, reference, body FROM n,"
            " (SELECT verdict, reference, body FROM samples WHERE run_id = 'seed')",
            f"{numbers} INSERT INTO records SELECT 10 + 2 * i + (side = 'trainer'), 'large', {name}, side, digest,"
            " NULL, 0.0 FROM n, (SELECT side, digest FROM records WHERE run_id = 'seed')",
            f"{numbers} INSERT INTO steps SELECT 'large', i, 0, 0, body FROM n, (SELECT body FROM steps WHERE"
            f" run_id = 'seed') WHERE i < {-(-samples // PER_STEP)}",
            "INSERT INTO runs SELECT 'large', first_at, last_at, body FROM runs WHERE run_id = 'seed'",
        ):
            database.execute(statement)


def start(folder: Path, times: int) -> Result:
    """From the command to an answer of /readyz, and the memory then."""
    seconds, memory = [], []
    for number in range(times):
        begun = time.perf_counter()
        with running_auditor(folder / f"{number}") as auditor:
            assert auditor.process is not None
            with urllib.request.urlopen(f"http://{auditor.http}/readyz", timeout=5) as answer:
                assert answer.status == 200
            seconds.append(time.perf_counter() - begun)
            memory.append(resident_mb(auditor.process.pid))
            auditor.stop()
    worst, most = max(seconds), max(memory)
    return {
        "seconds": {"median": round(statistics.median(seconds), 2), "max": round(worst, 2)},
        "resident_mb": round(most),
        "ok": worst < START_GOAL_S and most < IDLE_GOAL_MB,
    }


def producer(folder: Path, seconds: float) -> Result:
    """Steps of fixed work on one core that make 100,000 tokens a second, reported and not, in turn."""
    tokens, length = 100_000, 1000
    block = bytes(1 << 20)
    records = _records(length, tokens // length)

    def step(client: AuditClient | None, number: int) -> tuple[float, float]:
        """A second's worth of work, and then the records of it; seconds, and seconds of all threads on a core."""
        begun, worked = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            hashlib.sha256(block).digest()
        if client is not None:
            for rollout, trainer in records:
                client.submit_rollout(_renamed(rollout, number))
                client.submit_trainer(_renamed(trainer, number))
        return time.perf_counter() - begun, time.process_time() - worked

    repeats = 200
    repeats = max(1, round(repeats / step(None, 0)[1]))
    with running_auditor(folder) as auditor, AuditClient(auditor.grpc, "cost", spool_dir=folder / "spool") as client:
        on, off = [], []
        for number in range(max(4, round(seconds / 2))):
            off.append(step(None, number))
            on.append(step(client, number))
        counts = client.flush(30)
        assert counts.accepted == 2 * len(records) * len(on), counts
    ratio, of_cores = (statistics.median(a[i] / b[i] for a, b in zip(on, off, strict=True)) for i in (0, 1))
    return {
        "tokens_per_second": round(tokens / statistics.median(a[0] for a in on)),
        "step_seconds_on": round(statistics.median(a[0] for a in on), 4),
        "step_seconds_off": round(statistics.median(a[0] for a in off), 4),
        "ratio": round(ratio, 4),
        "ratio_of_core_seconds": round(of_cores, 4),
        "ok": ratio <= COST_GOAL,
    }


def _records(length: int, count: int) -> list[tuple[Any, Any]]:
    found = []
    for i in range(count):
        rollout, trainer = pair(f"{i}", run_id="cost")
        rng = np.random.default_rng(i)
        tokens = rng.integers(0, 331, 8 + length).astype(np.uint32)
        logprobs = -rng.exponential(1.0, length).astype(np.float32)
        change = {"tokens": tokens, "logprobs": logprobs, "mask": np.ones(length, np.bool_)}
        rollout = replace(rollout, **change)
        found.append((rollout, replace(trainer, **change, token_count=8 + length, tokens_digest="")))
    return found


def _renamed(record: Any, step: int) -> Any:
    return replace(record, step=step)


def main() -> int:
    """Run the parts; exit code 1 if one of them misses its goal."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.auditor_bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="receive, query, start, producer; default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load, and of the producer")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="in the ledger that is queried")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    parts: dict[str, Callable[[Path], Result]] = {
        "start": lambda folder: start(folder, 5),
        "receive": lambda folder: receive(folder, given.seconds),
        "producer": lambda folder: producer(folder, given.seconds),
        "query": lambda folder: query(folder, given.samples),
    }
    results: dict[str, Any] = {"machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}}
    for name in given.parts or parts:
        with tempfile.TemporaryDirectory(prefix="auditor-bench-") as folder:
            results[name] = parts[name](Path(folder))
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(not all(result.get("ok", True) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
