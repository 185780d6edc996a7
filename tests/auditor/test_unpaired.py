"""A sample of which one side never comes is given up once; where the side comes after all, the pair is judged once."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from auditor.codec import encode, to_wire
from auditor.contracts import known_contracts
from auditor.export.board import Board
from auditor.judge import MISSING_SIDE, Verdict
from auditor.pipeline import Incoming, Pipeline
from auditor.proto import audit_pb2 as pb
from auditor.proto.audit_pb2_grpc import AuditServiceStub
from auditor.records import Record, SampleKey
from auditor.retention import drop, evidence_before
from auditor.sampling import Rate
from auditor.storage.chain import verify
from auditor.storage.database import open_database
from auditor.storage.ledger import Ledger
from auditor.storage.reader import PENDING_SINCE, Reader
from auditor.storage.unit import Unit
from auditor.unpaired import Unpaired
from auditor.writer import Writer
from tests.auditor.postgres_server import Open
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import RESPONSE, one_ulp_off, pair

WAIT_S = 100.0


class World:
    """An auditor's ledger on a clock of the test's own."""

    def __init__(self, connect: Open, now: float = 0.0) -> None:
        self.now = now
        self._closed = False
        self.ledger = Ledger(connect(True), lambda: self.now)
        self.reader = Reader(lambda: connect(False))
        self.board = Board()
        self.writer = Writer(self.ledger, self.board.commit, lambda: None, 8)
        self.flow = Pipeline(known_contracts(), Rate(0.0), self.board, None)
        self.stopping = threading.Event()
        self.unpaired = Unpaired(self.reader, self.writer, self.flow, lambda: self.now, WAIT_S, self.stopping)

    def report(self, *records: Record) -> list[str]:
        batch = [Incoming(record, encode(record)) for record in records]
        return [r.outcome for r in self.writer.submit(lambda unit: self.flow.receive(unit, batch)).result()]

    def look(self, at: float) -> None:
        self.now = at
        self.unpaired.look()

    def counter(self, name: str) -> dict[str, float]:
        found = {dict(labels).get("side", ""): v for (n, labels), v in self.ledger.counters().items() if n == name}
        assert found == {
            dict(labels).get("side", ""): v for (n, labels), v in self.board.snapshot().counters.items() if n == name
        }
        return found

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.writer.close()
            self.ledger.close()


@pytest.fixture
def world(connect: Open) -> Iterator[World]:
    world = World(connect)
    yield world
    world.close()


def test_an_auditor_that_ends_gives_up_the_batch_that_it_is_at_and_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.unpaired._BATCH", 2)
    world.report(*(pair(f"{i}")[0] for i in range(5)))
    give_up = world.flow.give_up

    def ending(unit: Unit, keys: Sequence[SampleKey]) -> None:
        give_up(unit, keys)
        world.stopping.set()

    monkeypatch.setattr(world.flow, "give_up", ending)
    world.look(WAIT_S + 1)
    assert world.counter("unpaired_samples") == {"trainer": 2}


def test_a_sample_waits_so_long_and_no_longer(connect: Open, world: World) -> None:
    world.report(*pair("both"))
    world.report(pair("a")[0], pair("b")[1])
    world.now = 50.0
    world.report(pair("young")[0])
    world.look(99.0)
    assert world.reader.run("run").totals.verdicts == {"match": 1, "pending": 3}
    world.look(101.0)
    totals = world.reader.run("run").totals
    assert totals.verdicts == {"match": 1, "pending": 1, "not_comparable": 2}
    assert (totals.conditions, totals.missing, totals.samples) == ({MISSING_SIDE: 2}, {"trainer": 1}, 4)
    assert world.counter("unpaired_samples") == {"trainer": 1, "rollout": 1}
    assert world.board.snapshot().missing["run", "trainer"] == 1
    judged = world.reader.sample(SampleKey("run", 0, "b")).judgement
    assert (judged.verdict, judged.field) == (Verdict.NOT_COMPARABLE, "record")
    assert (judged.rollout_value, judged.trainer_value) == ("never came", "reported")
    world.look(101.0)
    assert world.counter("unpaired_samples") == {"trainer": 1, "rollout": 1}, "once"
    world.close()
    assert verify(connect(False)).entries == 2 + 1 + 3 + 2


def test_what_waits_is_found_without_a_look_at_all_that_does_not(tmp_path: Path) -> None:
    database = open_database(str(tmp_path / "ledger.db"), True)
    Ledger(database)
    plan = [row[3] for row in database.all(f"EXPLAIN QUERY PLAN {PENDING_SINCE}", (0.0, 1))]
    assert plan[0] == "SCAN s USING INDEX samples_pending"
    assert plan[1].startswith("SEARCH r USING INDEX records_by_sample"), plan
    database.close()


@pytest.mark.parametrize("mismatch", [False, True])
def test_a_side_that_comes_late_is_judged_as_if_in_time_and_counted_once(
    connect: Open, world: World, mismatch: bool
) -> None:
    rollout, trainer = pair("a")
    world.report(rollout)
    world.look(101.0)
    late = one_ulp_off(trainer) if mismatch else trainer
    assert world.report(late) == ["accepted"]
    assert world.report(late) == ["duplicate"]
    assert world.report(rollout) == ["duplicate"]
    totals = world.reader.run("run").totals
    assert totals.verdicts == {"mismatch" if mismatch else "match": 1}
    assert (totals.samples, totals.conditions, totals.missing) == (1, {}, {})
    assert (totals.compared_tokens, totals.drift.tokens) == (RESPONSE, RESPONSE)
    assert (world.counter("unpaired_samples"), world.counter("late_samples")) == ({"trainer": 1}, {"trainer": 1})
    assert world.counter("compared_tokens") == {"": RESPONSE}
    world.look(1000.0)
    assert world.counter("unpaired_samples") == {"trainer": 1}
    world.close()
    verify(connect(False))


def test_a_side_that_comes_while_its_sample_is_about_to_be_given_up_is_in_time(connect: Open, world: World) -> None:
    rollout, trainer = pair("a")
    world.report(rollout)
    (key,) = world.reader.pending_since(101.0, 9)
    world.report(trainer)
    world.writer.submit(lambda unit: world.flow.give_up(unit, [key])).result()
    assert world.reader.run("run").totals.verdicts == {"match": 1}
    assert world.counter("unpaired_samples") == {}
    verify(connect(False))


def test_what_was_given_up_may_be_retired_and_its_late_side_has_nothing_to_be_compared_with(
    connect: Open, world: World
) -> None:
    rollout, trainer = pair("a")
    world.report(rollout)
    assert evidence_before(world.reader, 1e9) == []
    world.look(101.0)
    evidence = evidence_before(world.reader, 1e9)
    assert world.writer.submit(lambda unit: drop(unit, evidence)).result() == 1
    assert world.report(trainer) == ["accepted"]
    totals = world.reader.run("run").totals
    assert (totals.samples, totals.verdicts, totals.conditions) == (1, {"not_comparable": 1}, {MISSING_SIDE: 1})
    assert (world.counter("late_samples"), world.board.snapshot().missing["run", "rollout"]) == ({}, 0)
    world.close()
    verify(connect(False))


def test_time_in_which_the_auditor_stood_still_counts_for_no_sample(
    connect: Open, world: World, request: pytest.FixtureRequest
) -> None:
    world.report(pair("a")[0])
    world.now = 60.0
    world.report(pair("b")[0])
    world.close()
    again = World(connect, now=10_060.0)
    request.addfinalizer(again.close)
    again.look(10_061.0)
    assert again.reader.run("run").totals.verdicts == {"pending": 2}
    again.look(10_060.0 + 41.0)
    assert again.reader.run("run").totals.verdicts == {"pending": 1, "not_comparable": 1}
    again.report(pair("c")[0])
    again.look(10_060.0 + 101.0)
    assert again.reader.run("run").totals.verdicts == {"pending": 1, "not_comparable": 2}


def send(auditor: AuditorProcess, *records: Record) -> Any:
    """One call, answered."""
    with grpc.insecure_channel(auditor.grpc) as channel:
        batch = pb.Batch(records=[to_wire(record) for record in records])
        return AuditServiceStub(channel).Submit(pb.SubmitRequest(batch=batch), timeout=20)


def test_a_real_auditor_gives_up_a_thousand_samples_and_forgets_none_that_comes(tmp_path: Path) -> None:
    with running_auditor(tmp_path, "--pair-wait-s", "2") as auditor:
        pairs = [pair(f"{i}", step=i // 100) for i in range(1000)]
        send(auditor, *(rollout for rollout, _ in pairs))
        auditor.wait_for("/api/v1/runs/run", lambda run: run["by_condition"] == {MISSING_SIDE: 1000})
        assert auditor.metrics()['auditor_unpaired_samples_total{run_id="run",side="trainer"}'] == 1000
        assert auditor.metrics()['auditor_missing_pairs{run_id="run",side="trainer"}'] == 0
        send(auditor, *(trainer for _, trainer in pairs[:10]))
        run = auditor.get("/api/v1/runs/run")
        assert run["by_verdict"] == {"match": 10, "not_comparable": 990}
        assert auditor.metrics()['auditor_late_samples_total{run_id="run",side="trainer"}'] == 10
        assert auditor.stop() == 0
    assert verify(open_database(str(auditor.ledger), False)).entries == 1000 + 1000 + 10 + 10
