"""What somebody changes in the tables with SQL, beside the chain, is found too."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from auditor.codec import encode
from auditor.contracts import known_contracts
from auditor.errors import ChainError
from auditor.export.board import Board
from auditor.judge import ReferenceLogprobs
from auditor.pipeline import Incoming, Pipeline
from auditor.records import SampleKey
from auditor.sampling import Rate
from auditor.storage.chain import verify
from auditor.storage.database import Database, open_database
from auditor.storage.ledger import Ledger
from tests.auditor.postgres_server import PostgresServer
from tests.auditor.samples import one_ulp_off, pair

ONE = "run_id = 'run' AND step = 0 AND sample_id = '3'"


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "ledger.db")
    server: PostgresServer = request.getfixturevalue("postgres")
    server.fresh_database()
    return server.url


@pytest.fixture
def database(place: str) -> Iterator[Database]:
    """Samples of two runs: matches, mismatches with and without the reference's word, one without its other side."""
    opened = open_database(place, True)
    ledger = Ledger(opened)
    queue: list[SampleKey] = []
    flow = Pipeline(known_contracts(), Rate(0.5), Board(), lambda key, urgent: queue.append(key))
    for i in range(12):
        rollout, trainer = pair(str(i), step=i // 4, run_id="run" if i < 8 else "other")
        records = (rollout, one_ulp_off(trainer) if i % 3 == 0 else trainer)
        with ledger.transaction() as unit:
            flow.receive(unit, [Incoming(record, encode(record)) for record in records[: 1 if i == 7 else 2]])
        for call in unit.after_commit:
            call()
    for key in queue[::2]:
        truth = pair(key.sample_id, step=key.step, run_id=key.run_id)[0].logprobs
        with ledger.transaction() as unit:
            flow.conclude(unit, key, ReferenceLogprobs(truth, truth, "fma32"))
    yield opened
    ledger.close()


@pytest.mark.parametrize(
    ("tampering", "said"),
    [
        (f"UPDATE samples SET verdict = 'match' WHERE {ONE}", "listed under is not its own"),
        (f"UPDATE samples SET verdict = 'pending' WHERE {ONE}", "listed under is not its own"),
        (f"UPDATE samples SET reference = 'failed' WHERE {ONE}", "listed under is not its own"),
        (
            f"UPDATE samples SET verdict = 'pending', body = replace(body, 'mismatch', 'pending') WHERE {ONE}",
            "not its last verdict",
        ),
        (f"DELETE FROM samples WHERE {ONE}", "was judged and is missing"),
        ("DELETE FROM samples WHERE verdict = 'pending'", "the totals of run 'run', step 1 are not"),
        ("DELETE FROM steps WHERE step = 0", "the totals of run 'run', step 0 are not"),
        ("UPDATE steps SET mismatches = 0", "the totals of run .* step . are not"),
        ("UPDATE steps SET body = (SELECT body FROM steps WHERE step = 1) WHERE step = 0", "step 0 are not"),
        ("UPDATE runs SET body = (SELECT body FROM runs WHERE run_id = 'run')", "the totals of run 'other' are not"),
        ("INSERT INTO steps SELECT run_id, 9, mismatches, pending, body FROM steps WHERE step = 0", "has 3 steps"),
        (
            "INSERT INTO runs SELECT 'new', first_at, last_at, body FROM runs WHERE run_id = 'run'",
            "'new' has no sample",
        ),
        (f"UPDATE records SET sample_id = 'z' WHERE {ONE}", "listed under another sample or side"),
        (f"UPDATE records SET side = 'third' WHERE {ONE} AND side = 'trainer'", "listed under another sample or side"),
        (f"UPDATE verdicts SET step = 1 WHERE {ONE}", "listed under another sample"),
        (
            "INSERT INTO verdicts SELECT seq + 1000, run_id, step, sample_id, body FROM verdicts WHERE sample_id = '0'",
            "a verdict of .* is in no entry",
        ),
    ],
)
def test_what_was_changed_beside_the_chain_is_named(database: Database, place: str, tampering: str, said: str) -> None:
    verify(open_database(place, False))
    assert database.run(tampering) > 0
    with pytest.raises(ChainError, match=said):
        verify(open_database(place, False))


def test_writing_goes_on_beside_it_and_is_not_taken_for_tampering(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that comes between the walk and the totals."""
    from auditor.storage import chain

    ledger = Ledger(open_database(place, True))
    flow = Pipeline(known_contracts(), Rate(0), Board(), None)

    def receive(sample: str) -> None:
        with ledger.transaction() as unit:
            flow.receive(unit, [Incoming(record, encode(record)) for record in pair(sample)])

    def late(database: Database) -> None:
        receive("late")
        real(database)

    receive("early")
    real = chain.check_state
    monkeypatch.setattr(chain, "check_state", late)
    assert verify(open_database(place, False)).entries == 3
    monkeypatch.undo()
    assert verify(open_database(place, False)).entries == 6
    ledger.close()
