"""A curve merges neighbouring steps: sums add up, the worst stays visible, and nothing compared is no zero."""

from pathlib import Path

import pytest

from auditor.drift import DriftSums
from auditor.errors import NotFoundError
from auditor.storage.curve import read_curve
from auditor.storage.database import open_database
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from auditor.storage.rows import Totals
from tests.auditor.postgres_server import PostgresServer

LAST = 2**53


@pytest.fixture(params=["sqlite", "postgresql"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Reader:
    """Ten steps: step 3 mismatches, nothing is compared in step 7, step 9 is incomplete, step 5 is not there."""
    where = str(tmp_path / "ledger.db")
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        server.fresh_database()
        where = server.url
    ledger = Ledger(open_database(where, writer=True))
    with ledger.transaction() as unit:
        for step in (0, 1, 2, 3, 4, 6, 7, 8, 9):
            drift = DriftSums(tokens=10, max_abs=0.5 if step == 3 else 0.0)
            totals = Totals(
                samples=2, verdicts={"match": 2}, compared_tokens=10, mismatched_tokens=3 * (step == 3), drift=drift
            )
            if step == 7:
                totals = Totals(samples=2, verdicts={"not_comparable": 2}, conditions={"weights": 2})
            if step == 9:
                totals += Totals(samples=1, verdicts={"pending": 1}, missing={"trainer": 1})
            unit.add_to_step("run", step, totals)
    ledger.close()
    return Reader(lambda: open_database(where, writer=False))


def test_with_points_enough_each_step_is_its_own(reader: Reader) -> None:
    points = read_curve(reader, "run", 0, LAST, 100)
    assert [point.first_step for point in points] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert all(point.first_step == point.last_step for point in points)
    assert [point.max_abs for point in points] == [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, None, 0.0, 0.0]
    assert [point.incomplete for point in points] == [0] * 8 + [1]
    assert points[6].not_comparable == 2


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_merged_points_add_up_and_keep_the_worst(reader: Reader, count: int) -> None:
    points = read_curve(reader, "run", 0, LAST, count)
    assert len(points) <= count
    assert sum(point.steps for point in points) == 9
    assert sum(point.compared_tokens for point in points) == 80
    assert sum(point.mismatched_tokens for point in points) == 3
    assert max(point.most_mismatched for point in points) == 3
    assert max(point.max_abs or 0.0 for point in points) == 0.5


def test_a_range_of_steps_is_cut_out(reader: Reader) -> None:
    points = read_curve(reader, "run", 2, 4, 100)
    assert [point.first_step for point in points] == [2, 3, 4]


def test_a_step_of_nothing_finite_is_no_difference_of_0(tmp_path: Path) -> None:
    where = str(tmp_path / "ledger.db")
    ledger = Ledger(open_database(where, writer=True))
    with ledger.transaction() as unit:
        for step, finite in enumerate((0, 0, 3)):
            drift = DriftSums(tokens=finite, nonfinite=4)
            unit.add_to_step("run", step, Totals(samples=1, compared_tokens=4 + finite, drift=drift))
    ledger.close()
    reader = Reader(lambda: open_database(where, writer=False))
    assert [point.max_abs for point in read_curve(reader, "run", 0, 9, 100)] == [None, None, 0.0]
    assert [point.max_abs for point in read_curve(reader, "run", 0, 9, 1)] == [0.0]


def test_a_run_that_is_not_there_is_an_error(reader: Reader) -> None:
    with pytest.raises(NotFoundError):
        read_curve(reader, "other", 0, LAST, 10)
