"""The list of capsules: mismatches whose evidence is held, page by page, each a file that opens."""

import urllib.request
from pathlib import Path

import pytest

from auditor.capsule import from_bytes
from auditor.client import AuditClient
from auditor.codec import encode
from auditor.contracts import known_contracts
from auditor.export.board import Board
from auditor.pipeline import Incoming, Pipeline
from auditor.retention import drop, evidence_before
from auditor.sampling import Rate
from auditor.storage.database import open_database
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from tests.auditor.processes import running_auditor
from tests.auditor.samples import one_ulp_off, pair


def test_mismatches_are_listed_in_order_page_by_page_and_can_be_had_one_by_one(tmp_path: Path) -> None:
    wrong = {(step, f"{i}") for step, i in ((0, 3), (0, 30), (2, 0), (2, 7), (5, 1))}
    with running_auditor(tmp_path) as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client:
            for step in range(6):
                for i in (0, 1, 3, 7, 30):
                    rollout, trainer = pair(f"{i}", step=step)
                    client.submit_rollout(rollout)
                    client.submit_trainer(one_ulp_off(trainer) if (step, f"{i}") in wrong else trainer)
            client.flush(10)
        listed, after = [], ""
        while after is not None:
            page = auditor.get(f"/api/v1/runs/run/capsules?limit=2&after={after}")
            assert len(page["capsules"]) <= 2
            listed += page["capsules"]
            after = page["next"]
        assert [(row["step"], row["sample_id"]) for row in listed] == sorted(wrong)
        for row in listed:
            assert (row["differing"], row["compared"], row["max_ulp"], row["cause"]) == (1, 32, 1, "reduction_order")
            with urllib.request.urlopen(
                f"http://{auditor.http}/api/v1/runs/run/capsules/{row['step']}/{row['sample_id']}", timeout=10
            ) as answer:
                capsule = from_bytes(answer.read())
            assert (capsule.key.step, capsule.key.sample_id) == (row["step"], row["sample_id"])


def test_what_has_been_retired_is_listed_no_more(tmp_path: Path) -> None:
    flags = ("--retain-days", "0.00002", "--retain-look-s", "0.1")
    with running_auditor(tmp_path, *flags) as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client:
            rollout, trainer = pair()
            client.submit_rollout(rollout)
            client.submit_trainer(one_ulp_off(trainer))
            client.flush(10)
        assert len(auditor.get("/api/v1/runs/run/capsules")["capsules"]) == 1
        auditor.wait_for("/api/v1/runs/run/capsules", lambda page: page["capsules"] == [])
        assert auditor.get("/api/v1/runs/run")["by_verdict"] == {"mismatch": 1}


def test_a_run_whose_mismatches_are_all_retired_is_looked_through_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from auditor.storage import reader as module

    monkeypatch.setattr(module, "_LOOKED_AT", 10)
    path = str(tmp_path / "ledger.db")
    ledger = Ledger(open_database(path, writer=True))
    flow = Pipeline(known_contracts(), Rate(0.0), Board(), None)
    with ledger.transaction() as unit:
        for i in range(35):
            rollout, trainer = pair(f"{i:02d}")
            flow.receive(unit, [Incoming(record, encode(record)) for record in (rollout, one_ulp_off(trainer))])
    reader = Reader(lambda: open_database(path, writer=False))
    with ledger.transaction() as unit:
        drop(unit, [e for e in evidence_before(reader, 1e12) if e.key.sample_id != "31"])
    ledger.close()
    found, after, pages = [], (0, ""), 0
    while after is not None:
        rows, after = reader.capsules("run", after, 5)  # type: ignore[assignment]
        found += [row.key.sample_id for row in rows]
        pages += 1
    assert (found, pages) == (["31"], 4)
