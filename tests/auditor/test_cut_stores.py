"""The auditor is cut from its database and from its object store, on the network; both are real."""

import json
import threading
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psycopg
import pytest

from auditor.client import AuditClient
from auditor.errors import LedgerError
from auditor.storage import postgres as driver
from auditor.storage.chain import verify
from auditor.storage.database import open_database
from tests.auditor.network import network
from tests.auditor.postgres_server import PostgresServer
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import pair
from tests.auditor.stores import Store, running_store
from tests.auditor.test_network import _produce
from tests.auditor.test_reference import true_pair, weights_root
from tests.auditor.test_survival import check_totals, submit_pairs
from tests.auditor.test_unpaired import send

__all__ = ["weights_root"]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch, running_store(patch) as running:
        yield running


def cut_from_postgres(folder: Path, server: PostgresServer, state: str, seconds: float, samples: int) -> str:
    """The auditor's log. Records are sent before, while the ledger is away, and after."""
    server.fresh_database()
    with network(f"127.0.0.1:{server.port}") as between:
        url = f"postgresql://auditor@{between.address}/auditor"
        with running_auditor(folder / "a", "--ledger", url) as auditor:
            with AuditClient(auditor.grpc, "run", spool_dir=folder / "s", queue_size=256) as client:
                submit_pairs(client, range(samples // 4))
                assert client.flush(20).accepted == samples // 2
                longest = [0.0]
                rest = range(samples // 4, samples)
                producer = threading.Thread(target=_produce, args=(client, rest, seconds / 2, longest))
                between.set(state)
                producer.start()
                time.sleep(seconds)
                producer.join()
                assert longest[0] < 0.25, "the job was held up"
                assert auditor.metrics()["auditor_ledger_bytes"] > 0, "a scrape does not wait for the ledger"
                assert client.counts.accepted == samples // 2, "acknowledged, and nowhere durable"
                between.set("up")
                counts = client.flush(60)
                assert (counts.queued, counts.spooled, counts.dropped, counts.refused) == (0, 0, 0, 0)
                assert counts.accepted + counts.duplicate == 2 * samples
            check_totals(auditor, samples)
            assert auditor.stop() == 0
            log = auditor.log
    assert verify(open_database(server.url, writer=False)).entries == 3 * samples
    return log


@pytest.mark.parametrize("state", ["down", "silent"])
def test_a_cut_from_postgresql_loses_nothing_counts_nothing_twice_and_heals(
    tmp_path: Path, postgres: PostgresServer, state: str
) -> None:
    log = cut_from_postgres(tmp_path, postgres, state, 2.0, 40)
    assert log.count("the ledger cannot be written: PostgreSQL ledger: ") == (state == "down"), "said once"
    assert log.count("the ledger is written again") == (state == "down")
    assert "Traceback" not in log


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("state", ["down", "silent"])
def test_a_minutes_cut_from_postgresql_loses_nothing_counts_nothing_twice_and_heals(
    tmp_path: Path, postgres: PostgresServer, state: str
) -> None:
    log = cut_from_postgres(tmp_path, postgres, state, 60.0, 400)
    assert log.count("the ledger is written again") == 1
    assert state == "down" or "no answer in 30 s; the connection is given up" in log
    assert "Traceback" not in log


def test_a_name_that_postgresql_cannot_take_is_refused_before_it_is_asked(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    postgres.fresh_database()
    with running_auditor(tmp_path, "--ledger", postgres.url) as auditor:
        for path in ("runs/a%00b", "runs/run/samples/0/%00", "runs/run/steps/0/samples?after=%00"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                auditor.get(f"/api/v1/{path}")
            assert (refused.value.code, json.load(refused.value)["code"]) == (422, "invalid_request")
        assert auditor.stop() == 0


def test_a_ledger_that_is_held_up_refuses_what_finds_no_room_to_wait_as_busy(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    postgres.fresh_database()
    flags = ("--ledger", postgres.url, "--write-queue", "2")
    with running_auditor(tmp_path, *flags) as auditor, psycopg.connect(postgres.url) as other:
        other.execute("LOCK TABLE entries IN ACCESS EXCLUSIVE MODE")
        with ThreadPoolExecutor(8) as callers:
            calls = [callers.submit(refusal, auditor, "0")]
            time.sleep(0.5)  # until it is being written, alone
            calls += [callers.submit(refusal, auditor, f"{i}") for i in range(1, 8)]
            deadline = time.monotonic() + 20
            while sum(call.done() for call in calls) < 5 and time.monotonic() < deadline:
                time.sleep(0.02)
            other.rollback()
            said = [call.result() for call in calls]
        refused = [details for details in said if details]
        assert len(refused) == 5, "one is written and two wait"
        assert set(refused) == {"busy: 2 batches wait to be written; try again"}
        assert auditor.metrics()['auditor_errors_total{code="busy",part="grpc"}'] == 5
        assert auditor.get("/api/v1/runs/run")["samples"] == 3
        assert auditor.stop() == 0


def refusal(auditor: AuditorProcess, sample: str) -> str:
    """What a call failed with, empty where it did not."""
    try:
        send(auditor, *pair(sample))
    except grpc.RpcError as error:
        return str(error.details())  # type: ignore[attr-defined]
    return ""


@pytest.mark.timeout(60)
def test_a_stopped_postgresql_fails_the_statement_and_is_taken_up_again(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped as a process: its kernel takes every byte and nobody answers."""
    monkeypatch.setattr(driver, "_WRITER_ANSWER_S", 1.0)
    monkeypatch.setattr(driver, "_READER_ANSWER_S", 0.5)
    postgres.fresh_database()
    writer, reader = open_database(postgres.url, True), open_database(postgres.url, False)
    writer.run("CREATE TABLE kept (n BIGINT)")
    postgres.freeze()
    try:
        for database, most in ((reader, 1.5), (writer, 2.5)):
            started = time.monotonic()
            with pytest.raises(LedgerError, match=r"no answer in (1|0\.5) s; the connection is given up"):
                database.run("BEGIN")
            assert time.monotonic() - started < most
        with pytest.raises(LedgerError, match="no connection: no answer in time"):
            reader.all("SELECT 1")
    finally:
        postgres.thaw()
    assert reader.all("SELECT 1") == [(1,)]
    for _ in range(50):  # the lost session holds the lock until the server has seen that its other end is gone
        try:
            writer.run("BEGIN")
            break
        except LedgerError:
            time.sleep(0.1)
    writer.many("INSERT INTO kept VALUES (?)", [(1,), (2,)])
    writer.run("COMMIT")
    assert reader.all("SELECT n FROM kept ORDER BY n") == [(1,), (2,)]
    writer.close()
    reader.close()


@pytest.mark.parametrize("state", ["down", "silent"])
def test_a_cut_from_the_archive_keeps_the_evidence_and_writes_each_record_away_once(
    tmp_path: Path, store: Store, state: str
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    with network(store.endpoint.removeprefix("http://")) as between:
        flags = ("--retain-days", "0.00001", "--retain-look-s", "0.2", "--archive", f"s3://bucket/cut-{state}")
        flags += ("--store-endpoint", f"http://{between.address}")
        with running_auditor(tmp_path, *flags) as auditor:
            between.set(state)
            for i in range(20):
                send(auditor, *pair(f"{i}"))
            if state == "down":
                failed = 'auditor_errors_total{code="archive_unavailable",part="retention"}'
                auditor.wait_for_metrics(lambda series: series.get(failed, 0) > 0)
            else:
                time.sleep(2.0)  # it waits for an answer, and nobody waits for it
            assert auditor.get("/api/v1/runs/run/samples/0/19")["trainer"] is not None
            between.set("up")
            auditor.wait_for_metrics(lambda series: series.get("auditor_retired_records_total") == 40, 60)
            assert auditor.stop() == 0
            said = "evidence that is to be retired: cannot be done now, to be tried again: archive bucket/cut-down: "
            assert (said in auditor.log) == (state == "down")
    rows = [
        row
        for name in store.names(f"cut-{state}")
        for row in parquet.read_table(name, filesystem=store.files).to_pylist()
    ]
    assert sorted(row["seq"] for row in rows) == sorted({row["seq"] for row in rows}), "each once"
    assert len(rows) == 40


@pytest.mark.soak
def test_an_archive_that_answers_nothing_does_not_keep_the_auditor_from_ending(tmp_path: Path, store: Store) -> None:
    """Before an orchestrator loses patience, which is half a minute."""
    with network(store.endpoint.removeprefix("http://")) as between:
        flags = ("--retain-days", "0.00001", "--retain-look-s", "0.2", "--archive", "s3://bucket/end")
        with running_auditor(tmp_path, *flags, "--store-endpoint", f"http://{between.address}") as auditor:
            between.set("silent")
            send(auditor, *pair("0"))
            time.sleep(2.0)
            assert auditor.process is not None
            auditor.process.terminate()
            started = time.monotonic()
            assert auditor.process.wait(60) == 0
            assert time.monotonic() - started < 25.0
        assert verify(open_database(str(auditor.ledger), writer=False)).payloads == 3, "two records and a verdict"


def test_while_the_weights_store_is_cut_off_samples_wait_and_are_recomputed_then(
    tmp_path: Path, store: Store, weights_root: Path
) -> None:
    store.put(weights_root / "v000001", "cut-weights/v000001")
    with network(store.endpoint.removeprefix("http://")) as between:
        flags = ("--weights-root", "s3://bucket/cut-weights", "--weights-cache", str(tmp_path / "copies"))
        flags += ("--store-endpoint", f"http://{between.address}", "--recompute-rate", "1")
        with running_auditor(tmp_path / "a", *flags) as auditor:
            between.set("down")
            for i in range(4):
                send(auditor, *true_pair(weights_root, f"{i}"))
            _wait_for_log(auditor, "is tried again later: ")
            run = auditor.get("/api/v1/runs/run")
            assert (run["by_reference"], run["by_verdict"]) == ({"queued": 4}, {"match": 4})
            between.set("up")
            run = auditor.wait_for("/api/v1/runs/run", lambda r: r["queued"] == 0, 90)
            assert run["by_reference"] == {"done": 4}
            assert auditor.stop() == 0


def _wait_for_log(auditor: AuditorProcess, said: str) -> None:
    deadline = time.monotonic() + 60
    while said not in auditor.log:
        assert time.monotonic() < deadline, auditor.log
        time.sleep(0.1)
