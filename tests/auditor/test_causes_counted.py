"""`by_cause` counts mismatches; what could not be compared is counted by its condition, and is no mismatch."""

from dataclasses import replace
from typing import Any

import pytest

from auditor.codec import encode
from auditor.errors import ConfigError
from auditor.export.views import counts
from auditor.pipeline import Incoming
from auditor.storage import database as tables
from auditor.storage import rows
from auditor.storage.chain import verify
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from auditor.storage.rows import Totals
from tests.auditor.postgres_server import Open
from tests.auditor.samples import one_ulp_off, pair
from tests.auditor.test_ledger import pipeline


def receive(ledger: Ledger) -> None:
    """One match, one mismatch, and two that cannot be compared, all of step 0."""
    batch = []
    for name in "abcd":
        rollout, trainer = pair(name)
        if name == "b":
            trainer = one_ulp_off(trainer)
        if name in "cd":
            trainer = replace(trainer, weight_version=0)
        batch += [Incoming(record, encode(record)) for record in (rollout, trainer)]
    with ledger.transaction() as unit:
        pipeline().receive(unit, batch)
    ledger.close()


def check(connect: Open) -> None:
    reader = Reader(lambda: connect(False))
    for totals in (reader.run("run").totals, reader.step("run", 0).totals):
        said = counts(totals)
        assert said["by_verdict"] == {"match": 1, "mismatch": 1, "not_comparable": 2}
        assert said["by_condition"] == {"weights": 2}
        assert said["by_cause"] == {"reduction_order": 1}
        assert sum(said["by_cause"].values()) == said["by_verdict"]["mismatch"]
    verify(connect(False))


def test_a_sample_that_cannot_be_compared_counts_under_its_condition_and_under_no_cause(connect: Open) -> None:
    receive(Ledger(connect(True)))
    check(connect)


def test_an_older_ledger_that_counted_them_is_set_right_when_it_is_opened(
    connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = rows._of

    def then(judgement: rows.Judgement, sign: int, *more: Any, **named: Any) -> Totals:
        return replace(now(judgement, sign, *more, **named), causes={judgement.cause: sign} if judgement.cause else {})

    with monkeypatch.context() as old:
        old.setattr(tables, "MIGRATIONS", tables.MIGRATIONS[:3])
        old.setattr(tables, "VERSION", 3)
        old.setattr(rows, "_of", then)
        receive(Ledger(connect(True)))
        before = Reader(lambda: connect(False)).run("run").totals
        assert before.causes == {"reduction_order": 1, "stale_weights": 2}
    with pytest.raises(ConfigError, match="schema version 3, this program"):
        verify(connect(False))
    Ledger(connect(True)).close()
    check(connect)
