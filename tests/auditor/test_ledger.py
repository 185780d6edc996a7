"""What every ledger keeps to, over SQLite and a real PostgreSQL alike."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from auditor.codec import encode
from auditor.contracts import known_contracts
from auditor.errors import ChainError, ConfigError, ConflictError, LedgerError, NotFoundError
from auditor.export.board import Board
from auditor.judge import Reference, ReferenceLogprobs, Verdict
from auditor.pipeline import Incoming, Pipeline
from auditor.records import SampleKey, Side
from auditor.sampling import Rate
from auditor.storage.chain import digest, verify
from auditor.storage.database import open_database
from auditor.storage.halves import Held
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from auditor.storage.unit import Stored, Unit
from auditor.writer import Writer
from tests.auditor.postgres_server import Open, PostgresServer
from tests.auditor.samples import RESPONSE, one_ulp_off, pair


def pipeline(board: Board | None = None, queue: list[SampleKey] | None = None) -> Pipeline:
    recompute = None if queue is None else lambda key, urgent: queue.append(key)
    return Pipeline(known_contracts(), Rate(1.0), board or Board(), recompute)


def add(unit: Unit, key: SampleKey, side: Side, payload: bytes) -> Stored:
    return unit.add_record(key, side, Held(digest(payload), payload), unit.held(key))


def receive(ledger: Ledger, flow: Pipeline, *samples: int) -> list[str]:
    batch = []
    for i in samples:
        rollout, trainer = pair(str(i), step=i // 4)
        trainer = one_ulp_off(trainer) if i % 10 == 3 else trainer
        batch += [Incoming(record, encode(record)) for record in (rollout, trainer)]
    with ledger.transaction() as unit:
        outcomes = [receipt.outcome for receipt in flow.receive(unit, batch)]
    for call in unit.after_commit:
        call()
    return outcomes


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_record_is_stored_once_and_a_different_one_is_a_conflict(connect: Open) -> None:
    ledger, key = Ledger(connect(True)), SampleKey("run", 0, "a")
    with ledger.transaction() as unit:
        assert add(unit, key, "rollout", b"one") is Stored.ACCEPTED
        assert add(unit, key, "rollout", b"one") is Stored.DUPLICATE
        with pytest.raises(ConflictError, match="a different rollout record"):
            add(unit, key, "rollout", b"two")
        assert add(unit, key, "trainer", b"two") is Stored.ACCEPTED
    held = unit.with_content(key, "rollout"), unit.with_content(key, "trainer")
    assert [one and one.payload for one in held] == [b"one", b"two"]
    ledger.close()


def test_what_is_written_is_read_by_somebody_else(connect: Open) -> None:
    ledger = Ledger(connect(True))
    receive(ledger, pipeline(), *range(8))
    reader = Reader(lambda: connect(False))
    (run,) = reader.runs(10)
    assert (run.run_id, run.steps, run.first_step, run.last_step, run.totals.samples) == ("run", 2, 0, 1, 8)
    assert run.totals.compared_tokens == 8 * RESPONSE
    assert [row.step for row in reader.steps("run", 0, 9, True, 10)] == [0]
    assert [row.key.sample_id for row in reader.samples("run", 1, "4", 2, None)] == ["5", "6"]
    assert reader.sample(SampleKey("run", 0, "3")).judgement.verdict is Verdict.MISMATCH
    assert [r.key.sample_id for r in reader.samples("run", 0, "", 9, Verdict.MISMATCH)] == ["3"]
    assert {side for _, side, _, _ in reader.sides()} == {"rollout", "trainer"}
    assert reader.size_bytes() > 0
    for missing in (
        lambda: reader.run("none"),
        lambda: reader.step("run", 9),
        lambda: reader.sample(SampleKey("run", 0, "x")),
    ):
        with pytest.raises(NotFoundError):
            missing()
    ledger.close()


def test_a_block_that_raises_leaves_nothing_behind(connect: Open) -> None:
    ledger = Ledger(connect(True))
    receive(ledger, pipeline(), 0)
    before = ledger.counters()
    with pytest.raises(ZeroDivisionError), ledger.transaction() as unit:  # noqa: PT012 - all of it is undone
        pipeline().receive(unit, [Incoming(record, encode(record)) for record in pair("9")])
        1 / 0  # noqa: B018
    assert ledger.counters() == before
    assert Reader(lambda: connect(False)).run("run").totals.samples == 1
    assert receive(ledger, pipeline(), 1) == ["accepted"] * 2
    ledger.close()
    assert verify(connect(False)).entries == 6


def test_a_part_that_raises_leaves_the_other_parts(connect: Open) -> None:
    ledger, key = Ledger(connect(True)), SampleKey("run", 0, "a")
    with ledger.transaction() as unit:
        with ledger.savepoint(unit):
            add(unit, key, "rollout", b"kept")
            unit.count("kept")
        with pytest.raises(ZeroDivisionError), ledger.savepoint(unit):  # noqa: PT012 - all of it is undone
            add(unit, key, "trainer", b"gone")
            unit.count("gone")
            unit.asked += 1
            unit.end_counters({"gone": []})
            1 / 0  # noqa: B018
        assert (unit.asked, unit.left) == (0, set())
    assert {name for name, _ in ledger.counters()} == {"kept"}
    ledger.close()
    assert verify(connect(False)).entries == 1


def test_a_board_rebuilt_from_the_ledger_is_the_board_that_was_kept(connect: Open) -> None:
    ledger, board = Ledger(connect(True)), Board()
    flow = pipeline(board)
    for i in range(12):
        receive(ledger, flow, i)
    rollout, _ = pair("late", step=1)
    with ledger.transaction() as unit:
        flow.receive(unit, [Incoming(rollout, encode(rollout))])
    for call in unit.after_commit:
        call()
    rebuilt = Board.rebuilt(ledger.counters(), Reader(lambda: connect(False)), 10).snapshot()
    kept = board.snapshot()
    assert (rebuilt.last_complete, rebuilt.sides) == (kept.last_complete, kept.sides)
    assert (rebuilt.missing, rebuilt.overdue) == (kept.missing, kept.overdue)
    assert kept.overdue["run", "trainer"] == 1
    ledger.close()


def test_the_references_word_is_recorded_once(connect: Open) -> None:
    ledger, queue = Ledger(connect(True)), []
    flow = pipeline(queue=queue)
    receive(ledger, flow, 0)
    (key,) = queue
    assert [k for k, _ in Reader(lambda: connect(False)).queued()] == [key]
    truth = pair("0")[0].logprobs
    for _ in range(3):
        with ledger.transaction() as unit:
            flow.conclude(unit, key, ReferenceLogprobs(truth, truth, "fma32"))
    reader = Reader(lambda: connect(False))
    assert reader.sample(key).judgement.reference is Reference.DONE
    assert reader.step("run", 0).totals.recomputed_tokens == RESPONSE
    found = reader.reference(key)
    assert found is not None
    assert found.tobytes() == truth.tobytes()
    ledger.close()


def test_a_second_writer_is_refused(connect: Open) -> None:
    first = connect(True)
    with pytest.raises(ConfigError, match="in use by another auditor"):
        connect(True)
    first.close()
    connect(True).close()


def test_the_chain_verifies_and_names_its_head(connect: Open) -> None:
    ledger = Ledger(connect(True))
    receive(ledger, pipeline(), *range(5))
    one = verify(connect(False))
    assert (one.entries, one.payloads) == (15, 15)
    receive(ledger, pipeline(), 5)
    two = verify(connect(False))
    assert two.head != one.head
    ledger.close()


@pytest.mark.parametrize(
    ("tampering", "said"),
    [
        ("UPDATE entries SET sample_id = 'z' WHERE seq = 4", "entry 4 .* does not follow"),
        ("DELETE FROM entries WHERE seq = 4", "entry 4 is missing"),
        ("UPDATE entries SET digest = (SELECT digest FROM entries WHERE seq = 1) WHERE seq = 4", "entry 4"),
        (
            "UPDATE records SET payload = (SELECT payload FROM records WHERE seq = 1) WHERE seq = 4",
            "entry 4: the record",
        ),
        ("UPDATE verdicts SET body = replace(body, 'mismatch', 'match')", "entry .*: the verdict of"),
        ("UPDATE samples SET body = replace(body, 'mismatch', 'match')", "the state of .* is not its last verdict"),
        ("DELETE FROM records WHERE seq = 5", "entry 5: the record .* is missing"),
        ("DELETE FROM verdicts WHERE seq = 3", "entry 3: the verdict .* is missing"),
    ],
)
def test_tampering_is_found(connect: Open, tampering: str, said: str) -> None:
    database = connect(True)
    ledger = Ledger(database)
    receive(ledger, pipeline(), 0, 1, 2, 3)
    verify(connect(False))
    assert database.run(tampering) > 0
    with pytest.raises(ChainError, match=said):
        verify(connect(False))
    ledger.close()


def test_a_ledger_from_a_newer_program_is_refused(connect: Open) -> None:
    database = connect(True)
    Ledger(database)
    database.run("UPDATE schema_version SET version = 99")
    with pytest.raises(ConfigError, match="schema version 99"):
        Ledger(database)
    database.close()


def test_a_killed_postgresql_fails_what_is_in_flight_and_is_found_again(postgres: PostgresServer) -> None:
    postgres.fresh_database()
    ledger = Ledger(open_database(postgres.url, True))
    receive(ledger, pipeline(), 0)
    postgres.kill()
    with pytest.raises(LedgerError, match="PostgreSQL ledger"):
        receive(ledger, pipeline(), 1)
    postgres.start()
    assert receive(ledger, pipeline(), 1) == ["accepted"] * 2
    assert receive(ledger, pipeline(), 0) == ["duplicate"] * 2
    ledger.close()
    assert verify(open_database(postgres.url, False)).entries == 6


def test_a_reader_asks_again_where_the_server_went_and_came_back_meanwhile(postgres: PostgresServer) -> None:
    """Nothing tells an idle reader; but what belongs to a transaction ends with it."""
    postgres.fresh_database()
    writer, idle, inside = (open_database(postgres.url, at == 0) for at in range(3))
    inside.run(inside.snapshot)
    postgres.kill()
    postgres.start()
    assert idle.all("SELECT 1") == [(1,)]
    with pytest.raises(LedgerError):
        inside.all("SELECT 1")
    with pytest.raises(LedgerError):
        writer.all("SELECT 1")
    for database in (writer, idle, inside):
        database.close()


def test_a_lock_that_another_session_took_meanwhile_fails_the_write_and_not_the_writer(
    postgres: PostgresServer,
) -> None:
    postgres.fresh_database()
    ledger = Ledger(open_database(postgres.url, True))
    writer = Writer(ledger, lambda counts: None, lambda: None, 8)
    assert writer.submit(lambda unit: unit.count("a")).exception(5) is None
    with psycopg.connect(postgres.url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
        other.execute("SELECT pg_advisory_lock(%s)", (0x61756469746F72,))
        for _ in range(3):  # the first one finds the connection lost, the others find the lock taken
            assert isinstance(writer.submit(lambda unit: unit.count("a")).exception(10), LedgerError)
        assert "in use by another auditor" in writer.trouble()
    wait_until(lambda: writer.trouble() == "")
    writer.close()
    ledger.close()


def test_a_writer_whose_observer_raises_answers_everybody_and_goes_on(tmp_path: Path) -> None:
    ledger, heard = Ledger(open_database(str(tmp_path / "ledger.db"), True)), iter([None])
    recovered: list[bool] = []
    # The second commit's counters find an exhausted observer.
    writer = Writer(ledger, lambda counts: next(heard), lambda: recovered.append(True), 8)
    assert writer.submit(lambda unit: unit.count("a")).exception(5) is None
    assert isinstance(writer.submit(lambda unit: unit.count("a")).exception(5), LedgerError)
    assert writer.trouble() == "", "the probe goes through, and with it what is durable is read anew"
    assert recovered == [True]
    writer.close()
    assert ledger.counters()["a", ()] == 2.0
    ledger.close()


def test_an_acknowledged_commit_is_flushed_whatever_the_server_says(postgres: PostgresServer) -> None:
    postgres.fresh_database()
    with psycopg.connect(postgres.url, autocommit=True) as operator:
        operator.execute("ALTER DATABASE auditor SET synchronous_commit = off")
    database = open_database(postgres.url, True)
    assert database.all("SHOW synchronous_commit") == [("on",)]
    assert database.all("SHOW tcp_keepalives_idle") == [("10",)]
    database.close()


def test_a_ledger_that_fails_in_the_middle_of_a_group_stores_none_of_it_by_halves(tmp_path: Path) -> None:
    """SQLite undoes the whole transaction when the disk is full, and what came after must not go on beside it."""
    database = open_database(str(tmp_path / "ledger.db"), True)
    ledger = Ledger(database)
    receive(ledger, pipeline(), 0)
    writer = Writer(ledger, lambda counts: None, lambda: None, 8)
    key, started = SampleKey("run", 5, "x"), threading.Event()

    def small(unit: Unit, sample: str) -> None:
        add(unit, SampleKey("run", 5, sample), "rollout", b"small")

    def too_large(unit: Unit) -> None:
        add(unit, key, "rollout", bytes(1 << 20))

    writer.submit(lambda unit: started.wait(5))  # so that the three that follow are one group
    database.run(f"PRAGMA max_page_count = {database.all('PRAGMA page_count')[0][0] + 40}")
    waiting = [writer.submit(lambda unit: small(unit, "a")), writer.submit(too_large)]
    waiting.append(writer.submit(lambda unit: small(unit, "b")))
    started.set()
    assert waiting[0].exception(5) is None
    assert isinstance(waiting[1].exception(5), LedgerError)
    assert waiting[2].exception(5) is None
    assert writer.trouble() == ""
    assert isinstance(writer.submit(too_large).exception(5), LedgerError)
    assert writer.trouble() == "", "a small write finds out anew, though nobody else writes"
    writer.close()
    ledger.close()
    reader = Reader(lambda: open_database(str(tmp_path / "ledger.db"), False))
    rows = reader.database.all("SELECT sample_id FROM records WHERE step = 5 ORDER BY sample_id")
    assert rows == [("a",), ("b",)]
    assert verify(open_database(str(tmp_path / "ledger.db"), False)).entries == 3 + 2


def test_a_ledger_of_the_first_version_is_brought_up_to_date(connect: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from auditor.storage import database as module

    with monkeypatch.context() as old:
        old.setattr(module, "MIGRATIONS", module.MIGRATIONS[:1])
        old.setattr(module, "VERSION", 1)
        ledger = Ledger(connect(True))
        receive(ledger, pipeline(), 0)
        ledger.close()
    ledger = Ledger(connect(True))
    assert receive(ledger, pipeline(), 0, 1) == ["duplicate"] * 2 + ["accepted"] * 2
    ledger.close()
    assert verify(connect(False)).entries == 6
