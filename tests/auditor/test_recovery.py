"""After a commit whose answer is lost, and after stored bytes that have rotted: what is shown is what is durable."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from auditor.codec import encode
from auditor.contracts import known_contracts
from auditor.errors import LedgerError
from auditor.export.board import Board
from auditor.judge import Faulty, Reference, ReferenceLogprobs, Verdict
from auditor.pipeline import Incoming, Pipeline
from auditor.records import Record, SampleKey
from auditor.sampling import Rate
from auditor.storage.database import open_database
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from auditor.writer import Writer
from tests.auditor.samples import one_ulp_off, pair


class World:
    """An auditor's writer and board, and a database whose next commit may happen without an answer."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.cut, self.faults = str(path), False, list[tuple[str, str]]()
        self.database = open_database(self.path, writer=True)
        run = self.database.run

        def cut_off(sql: str, arguments: Sequence[Any] = ()) -> int:
            changed = run(sql, arguments)
            if sql == "COMMIT" and self.cut:
                self.cut = False
                raise LedgerError("no answer")
            return changed

        monkeypatch.setattr(self.database, "run", cut_off)
        self.ledger = Ledger(self.database)
        self.reader = Reader(lambda: open_database(self.path, writer=False))
        self.board = Board(shown_runs=10)
        self.flow = Pipeline(
            known_contracts(), Rate(0.0), self.board, None, on_fault=lambda *fault: self.faults.append(fault)
        )
        self.writer = Writer(self.ledger, self.board.commit, self.recover, 8)

    def recover(self) -> None:
        self.board.rebuild(self.ledger.counters(), self.reader)

    def receive(self, *records: Record) -> list[str]:
        batch = [Incoming(record, encode(record)) for record in records]
        return [r.outcome for r in self.writer.submit(lambda unit: self.flow.receive(unit, batch)).result()]

    def lost(self, *records: Record) -> None:
        self.cut = True
        with pytest.raises(LedgerError, match="no answer"):
            self.receive(*records)

    def close(self) -> None:
        self.writer.close()
        self.ledger.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path / "ledger.db", monkeypatch)
    yield world
    world.close()


def test_gauges_are_those_of_the_ledger_after_a_commit_whose_answer_was_lost(world: World) -> None:
    (first, its), (second, other) = pair("0", step=0), pair("1", step=1)
    world.receive(first)
    world.lost(its, second)  # completes one sample and begins another
    assert world.receive(pair("2", step=2)[0]) == ["accepted"]
    kept, read = world.board.snapshot(), Board.rebuilt(world.ledger.counters(), world.reader, 10).snapshot()
    assert (kept.missing, kept.overdue, kept.counters) == (read.missing, read.overdue, read.counters)
    assert (kept.missing["run", "trainer"], kept.overdue["run", "trainer"]) == (2, 0)
    assert {side: step for (_, side), (step, _) in kept.sides.items()} == {"rollout": 2, "trainer": 0}
    assert kept.last_complete["run"].step == 0
    assert world.receive(its, other) == ["duplicate", "accepted"]
    assert world.board.snapshot().missing["run", "trainer"] == 1


def test_a_transaction_after_the_lost_one_is_counted_once(world: World) -> None:
    world.lost(pair("0")[0])
    rollout, trainer = pair("1")
    assert world.receive(rollout, one_ulp_off(trainer)) == ["accepted"] * 2
    snapshot = world.board.snapshot()
    assert snapshot.missing["run", "trainer"] == 1
    assert snapshot.counters["mismatched_tokens", (("run_id", "run"), ("side", "pair"))] == 1


def test_samples_that_wait_in_more_steps_than_a_thousand_are_all_counted_after_a_start(world: World) -> None:
    sides = [pair("0", step=step) for step in range(1010)]
    world.receive(*(rollout for rollout, _ in sides))
    world.recover()
    assert world.board.snapshot().missing["run", "trainer"] == 1010
    world.receive(*(trainer for _, trainer in sides[:9]))
    snapshot = world.board.snapshot()
    assert (snapshot.missing["run", "trainer"], snapshot.overdue["run", "trainer"]) == (1001, 0)
    world.receive(*(trainer for _, trainer in sides[-9:]))
    snapshot = world.board.snapshot()
    assert (snapshot.missing["run", "trainer"], snapshot.overdue["run", "trainer"]) == (992, 992)


@pytest.mark.parametrize("rotten", [b"\xff" * 9, b"", "the other side", "one bit"])
def test_a_rotten_record_costs_its_own_sample_a_verdict_and_no_other_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rotten: bytes | str
) -> None:
    before = World(tmp_path / "ledger.db", monkeypatch)
    before.receive(*(pair(name)[0] for name in "012"))
    rollout, trainer = pair("1")
    still_records = {"the other side": trainer, "one bit": one_ulp_off(rollout)}
    payload = encode(still_records[rotten]) if isinstance(rotten, str) else rotten
    before.writer.submit(
        lambda unit: before.database.run("UPDATE records SET payload = ? WHERE sample_id = '1'", (payload,))
    ).result()
    before.close()
    with closing(World(tmp_path / "ledger.db", monkeypatch)) as after:
        assert after.receive(*(pair(name)[1] for name in "012")) == ["accepted"] * 3
        said = [after.reader.sample(SampleKey("run", 0, name)).judgement for name in "012"]
    assert [judgement.verdict for judgement in said] == [Verdict.MATCH, Verdict.ERROR, Verdict.MATCH]
    assert said[1].reference_error.startswith("evidence_unreadable: the stored rollout record: ")
    assert after.faults == [("judge", "evidence_unreadable")]


def test_a_record_that_rots_while_the_reference_is_asked_is_not_judged_by_what_it_has_become(world: World) -> None:
    flow, key = Pipeline(known_contracts(), Rate(0.0), world.board, lambda key, urgent: None), SampleKey("run", 0, "0")
    rollout, trainer = pair("0")
    wrong, batch = one_ulp_off(trainer), [rollout, one_ulp_off(trainer)]
    world.writer.submit(lambda unit: flow.receive(unit, [Incoming(one, encode(one)) for one in batch])).result()
    rot = "UPDATE records SET payload = ? WHERE side = 'trainer'"
    world.writer.submit(lambda unit: world.database.run(rot, (encode(trainer),))).result()
    said = ReferenceLogprobs(wrong.logprobs, wrong.logprobs, "fma32")
    world.writer.submit(lambda unit: flow.conclude(unit, key, said)).result()
    judgement = world.reader.sample(key).judgement
    assert (judgement.reference, judgement.side) == (Reference.FAILED, Faulty.UNKNOWN)
    assert judgement.reference_error.startswith("evidence_unreadable: ")
    counters = world.board.snapshot().counters
    assert counters["recompute_errors", (("code", "evidence_unreadable"), ("run_id", "run"))] == 1


def test_a_scrape_has_so_many_runs_and_no_more_those_that_were_heard_of_last(world: World) -> None:
    for number in range(14):
        world.receive(pair("0", run_id=f"run-{number:02d}")[0])
    world.receive(pair("1", run_id="run-02")[0])
    snapshot = world.board.snapshot()
    expected = {"run-02", *(f"run-{number:02d}" for number in range(5, 14))}
    assert {run for run, _ in snapshot.missing} == {run for run, _ in snapshot.sides} == expected
    assert {dict(labels)["run_id"] for _, labels in snapshot.counters if labels} == expected
    assert len(world.board.silences()) == 14, "the others are still to leave"
