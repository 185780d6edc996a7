"""What one transaction holds back until its end changes nothing of what is written, whichever way records are cut."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditor.codec import encode
from auditor.contracts import known_contracts
from auditor.errors import LedgerError
from auditor.export.board import Board
from auditor.judge import Verdict
from auditor.pipeline import Incoming, Pipeline
from auditor.records import Record, SampleKey
from auditor.sampling import Rate
from auditor.storage.chain import verify
from auditor.storage.database import open_database
from auditor.storage.halves import Halves
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from auditor.storage.unit import Unit
from tests.auditor.postgres_server import Open
from tests.auditor.samples import one_ulp_off, pair

STATE = ("entries", "verdicts", "samples", "steps", "sides", "counters")


def records() -> list[Record]:
    """Six samples of two steps: matches, a mismatch, one that cannot be compared, and one whose trainer never comes."""
    out: list[Record] = []
    for i in range(6):
        rollout, trainer = pair(str(i), step=i // 4)
        trainer = one_ulp_off(trainer) if i == 1 else replace(trainer, weight_version=7) if i == 2 else trainer
        out += [rollout, trainer]
    return out[:-1]


def receive(unit: Unit, batch: Sequence[Record]) -> list[str]:
    flow = Pipeline(known_contracts(), Rate(1.0), Board(), None)
    return [receipt.outcome for receipt in flow.receive(unit, [Incoming(one, encode(one)) for one in batch])]


def state(path: Path) -> dict[str, list[Any]]:
    """The tables but for the sums of drift, whose last bits are those of an order of float64 additions."""
    database = open_database(str(path), writer=False)
    tables = {table: sorted(database.all(f"SELECT * FROM {table}")) for table in STATE}
    tables["steps"] = [(*row, {**json.loads(body), "drift": None}) for *row, body in tables["steps"]]
    return tables


@pytest.mark.parametrize("memory", [0, 8000, 1 << 20])
@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_however_records_are_cut_into_transactions_the_ledger_is_the_same(
    tmp_path: Path, cut: int, memory: int
) -> None:
    told, heads = [], []
    for name, length in (("together", len(records())), ("cut", cut)):
        path = tmp_path / name
        ledger = Ledger(open_database(str(path), writer=True), lambda: 1.0, Halves(memory))
        for first in range(0, len(records()), length):
            with ledger.transaction() as unit:
                receive(unit, records()[first : first + length])
        ledger.close()
        told.append(state(path))
        heads.append(verify(open_database(str(path), writer=False)).head)
    assert heads[0] == heads[1]
    assert told[0] == told[1]
    assert len(told[0]["entries"]) == 11 + 5


def test_a_sample_completed_in_a_part_that_raises_waits_as_before(connect: Open) -> None:
    ledger, keys = Ledger(connect(True)), [SampleKey("run", 0, name) for name in "01"]
    with ledger.transaction() as unit:
        with ledger.savepoint(unit):
            assert receive(unit, [pair("0")[0], pair("1")[0]]) == ["accepted"] * 2
        with pytest.raises(ZeroDivisionError), ledger.savepoint(unit):  # noqa: PT012 - all of it is undone
            receive(unit, [pair("0")[1], pair("1")[1]])
            1 / 0  # noqa: B018
        with ledger.savepoint(unit):
            assert receive(unit, [*pair("0"), pair("0")[1]]) == ["duplicate", "accepted", "duplicate"]
    reader = Reader(lambda: connect(False))
    assert [reader.sample(key).judgement.verdict for key in keys] == [Verdict.MATCH, Verdict.PENDING]
    assert reader.missing("run") == [(0, {"rollout": 0, "trainer": 1})]
    assert verify(connect(False)).entries == 4
    ledger.close()


def test_what_a_transaction_has_brought_is_what_it_retires(connect: Open) -> None:
    ledger = Ledger(connect(True))
    with ledger.transaction() as unit:
        receive(unit, pair("0"))
        unit.drop_evidence([1], [SampleKey("run", 0, "0")])
        assert unit.with_content(SampleKey("run", 0, "0"), "rollout") is None
        assert unit.with_content(SampleKey("run", 0, "0"), "trainer") is not None
    assert verify(connect(False)).payloads == 2, "the trainer's record and the verdict"
    ledger.close()


def test_only_what_waits_is_kept_at_hand(tmp_path: Path) -> None:
    halves = Halves()
    ledger = Ledger(open_database(str(tmp_path / "ledger"), writer=True), lambda: 1.0, halves)
    with ledger.transaction() as unit:
        receive(unit, [pair(name)[0] for name in "012"])
    assert len(halves) == 3
    with ledger.transaction() as unit:
        receive(unit, [pair(name)[1] for name in "012"])
    assert len(halves) == 0
    ledger.close()


def test_after_a_commit_that_failed_and_happened_all_the_same_the_ledger_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database(str(tmp_path / "ledger"), writer=True)
    ledger, (rollout, trainer) = Ledger(database), pair("0")
    with ledger.transaction() as unit:
        receive(unit, [rollout])
    run = database.run

    def cut_off(sql: str, arguments: Sequence[Any] = ()) -> int:
        changed = run(sql, arguments)
        if sql == "COMMIT":
            raise LedgerError("no answer")
        return changed

    with monkeypatch.context() as patched:
        patched.setattr(database, "run", cut_off)
        with pytest.raises(LedgerError), ledger.transaction() as unit:
            receive(unit, [trainer])
    with ledger.transaction() as unit:
        assert receive(unit, [trainer]) == ["duplicate"]
    ledger.close()


def test_a_half_whose_evidence_was_retired_is_not_compared(connect: Open) -> None:
    ledger, key = Ledger(connect(True)), SampleKey("run", 0, "0")
    rollout, trainer = pair("0")
    with ledger.transaction() as unit:
        receive(unit, [rollout])
    with ledger.transaction() as unit:
        unit.drop_evidence([1], [key])
    with ledger.transaction() as unit:
        receive(unit, [trainer])
    assert Reader(lambda: connect(False)).sample(key).judgement.verdict is Verdict.PENDING
    ledger.close()
