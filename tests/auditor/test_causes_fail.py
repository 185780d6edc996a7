"""What fails in a search for causes or in a judgement costs no record and no worker: `undiagnosed`, verdict `error`."""

import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditor import pipeline, recompute_worker
from auditor.client import AuditClient
from auditor.codec import encode
from auditor.config import Config
from auditor.export.board import Board
from auditor.main import Auditor
from auditor.pipeline import Incoming, Pipeline
from auditor.recompute_worker import Models, answer
from auditor.records import Layout, SampleKey
from auditor.sampling import Rate
from auditor.storage.database import open_database
from auditor.storage.ledger import Ledger
from auditor.weights_place import LocalWeights
from tests.auditor.samples import CONTRACTS, one_ulp_off, pair
from tests.auditor.test_reference import true_pair, weights_root

__all__ = ["weights_root"]


def _fails(*_: Any, **__: Any) -> Any:
    raise IndexError("a hypothesis that was not meant for this")


def test_the_batch_is_stored_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "diagnose_pair", _fails)
    ledger = Ledger(open_database(str(tmp_path / "ledger.db"), writer=True))
    flow = Pipeline(CONTRACTS, Rate(0), Board(), None)
    rollout, trainer = pair()
    records = (rollout, one_ulp_off(trainer))
    with ledger.transaction() as unit:
        receipts = flow.receive(unit, [Incoming(record, encode(record)) for record in records])
    with ledger.transaction() as unit:
        judgement = unit.judgement(SampleKey("run", 0, "0"))
    ledger.close()
    assert [receipt.outcome for receipt in receipts] == ["accepted", "accepted"]
    assert judgement is not None
    assert (judgement.verdict, judgement.cause) == ("mismatch", "undiagnosed")


def test_a_sample_that_cannot_be_judged_is_stored_with_the_verdict_error_and_is_a_fault_of_the_auditors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "judge_pair", _fails)
    config = Config(grpc="127.0.0.1:0", http="127.0.0.1:0", ledger=str(tmp_path / "ledger.db"))
    auditor = Auditor(config)
    try:
        with AuditClient(auditor.addresses["grpc"], "run", spool_dir=tmp_path / "spool") as client:
            rollout, trainer = pair()
            client.submit_rollout(rollout)
            client.submit_trainer(trainer)
            assert client.flush(10).accepted == 2
        with urllib.request.urlopen(f"http://{auditor.addresses['http']}/api/v1/runs/run", timeout=10) as answer:
            assert json.loads(answer.read())["by_verdict"] == {"error": 1}
        with urllib.request.urlopen(f"http://{auditor.addresses['http']}/metrics", timeout=10) as answer:
            assert 'auditor_errors_total{code="internal",part="judge"} 1.0' in answer.read().decode()
    finally:
        auditor.close()


def test_a_search_that_fails_is_counted_as_a_fault_of_the_auditors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "diagnose_pair", _fails)
    auditor = Auditor(Config(grpc="127.0.0.1:0", http="127.0.0.1:0", ledger=str(tmp_path / "ledger.db")))
    try:
        with AuditClient(auditor.addresses["grpc"], "run", spool_dir=tmp_path / "spool") as client:
            rollout, trainer = pair()
            client.submit_rollout(rollout)
            client.submit_trainer(one_ulp_off(trainer))
            assert client.flush(10).accepted == 2
        with urllib.request.urlopen(f"http://{auditor.addresses['http']}/metrics", timeout=10) as answer:
            assert 'auditor_errors_total{code="internal",part="causes"} 1.0' in answer.read().decode()
    finally:
        auditor.close()


def test_the_reference_answers_all_the_same(weights_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_worker, "diagnose_sample", _fails)
    rollout, trainer = true_pair(weights_root, "a")
    first = encode(rollout)
    job = {"rollout_bytes": len(first), "diagnose": 5.0}
    header, body = answer(Models(LocalWeights(weights_root)), job, first + encode(one_ulp_off(trainer)))
    assert header == {"mma": "fma32", "causes": None, "first_layers": (None, None)}
    assert body == rollout.logprobs.tobytes()


def test_a_token_beyond_the_models_vocabulary_is_refused_by_the_reference(weights_root: Path) -> None:
    rollout, trainer = true_pair(weights_root, "a")
    tokens = rollout.tokens.copy()
    tokens[3] = 2**30
    layout = Layout(1, 1, 2**31, 2**31, (0, 2**31))
    first = encode(replace(rollout, tokens=tokens, layout=layout))
    other = encode(replace(trainer, tokens=tokens, tokens_digest="", layout=layout))
    job = {"rollout_bytes": len(first), "diagnose": 0.0}
    header, _ = answer(Models(LocalWeights(weights_root)), job, first + other)
    assert header["code"] == "reference_refused"
    assert "token id 1073741824 is beyond the model's vocabulary of 331" in header["error"]
