"""The present state must follow from the chain: each sample from its last verdict, each total from its samples.

What cannot be told from the samples is left out: the sums of differences, for which both records are needed, and the
range of weight versions, which remembers what a sample was before it was judged.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from auditor.drift import NOTHING
from auditor.errors import ChainError
from auditor.judge import Judgement
from auditor.records import SampleKey
from auditor.storage.database import Database, Row
from auditor.storage.rows import Totals, change

_PAGE: Final = 2000
_NOT_SUMMED: Final = {"drift", "weight_versions"}
# A statement and what is wrong with the sample that it finds.
_FAULTS: Final = (
    (
        "SELECT r.run_id, r.step, r.sample_id FROM records r LEFT JOIN entries e"
        " ON e.seq = r.seq AND e.kind = 'record' WHERE e.seq IS NULL LIMIT 1",
        "a record of {} is in no entry",
    ),
    (
        "SELECT v.run_id, v.step, v.sample_id FROM verdicts v LEFT JOIN entries e"
        " ON e.seq = v.seq AND e.kind = 'verdict' WHERE e.seq IS NULL LIMIT 1",
        "a verdict of {} is in no entry",
    ),
    (
        "SELECT v.run_id, v.step, v.sample_id FROM verdicts v LEFT JOIN samples s"
        " ON s.run_id = v.run_id AND s.step = v.step AND s.sample_id = v.sample_id WHERE s.run_id IS NULL LIMIT 1",
        "{} was judged and is missing",
    ),
    (
        "SELECT s.run_id, s.step, s.sample_id FROM samples s LEFT JOIN"
        " (SELECT run_id, step, sample_id, max(seq) AS seq FROM verdicts GROUP BY run_id, step, sample_id) l"
        " ON l.run_id = s.run_id AND l.step = s.step AND l.sample_id = s.sample_id LEFT JOIN verdicts v"
        " ON v.seq = l.seq WHERE (s.verdict <> 'pending' OR l.seq IS NOT NULL)"
        " AND (v.body IS NULL OR v.body <> s.body) LIMIT 1",
        "the state of {} is not its last verdict",
    ),
)


def check_state(database: Database) -> None:
    """ChainError names the first sample, step or run that does not follow from what the chain covers."""
    for statement, said in _FAULTS:
        rows = database.all(statement)
        if rows:
            raise ChainError(said.format(SampleKey(*rows[0])))
    steps: dict[str, int] = {}
    run_id, run = "", Totals()
    for (at_run, step), totals in _summed(_samples(database)):
        if at_run != run_id:
            _check_run(database, run_id, run)
            run_id, run = at_run, Totals()
        _check_step(database, at_run, step, totals)
        run += totals
        steps[at_run] = steps.get(at_run, 0) + 1
    _check_run(database, run_id, run)
    for at_run, count in database.all("SELECT run_id, count(*) FROM steps GROUP BY run_id"):
        if steps.get(at_run, 0) != count:
            raise ChainError(f"run {at_run!r} has {count} steps, and samples of {steps.get(at_run, 0)}")
    for (at_run,) in database.all("SELECT run_id FROM runs"):
        if at_run not in steps:
            raise ChainError(f"run {at_run!r} has no sample")


def _samples(database: Database) -> Iterator[Row]:
    """All of them in the order of their keys."""
    after: tuple[str, int, str] = ("", -1, "")
    while True:
        rows = database.all(
            "SELECT run_id, step, sample_id, verdict, reference, body FROM samples"
            " WHERE (run_id, step, sample_id) > (?, ?, ?) ORDER BY run_id, step, sample_id LIMIT ?",
            (*after, _PAGE),
        )
        if not rows:
            return
        yield from rows
        after = rows[-1][:3]


def _summed(samples: Iterator[Row]) -> Iterator[tuple[tuple[str, int], Totals]]:
    """The totals of each step."""
    at: tuple[str, int] | None = None
    totals = Totals()
    for run_id, step, sample_id, verdict, reference, body in samples:
        judgement = Judgement.from_json(json.loads(body))
        if (judgement.verdict.value, judgement.reference.value) != (verdict, reference):
            raise ChainError(f"the verdict that {SampleKey(run_id, step, sample_id)} is listed under is not its own")
        if at is not None and at != (run_id, step):
            yield at, totals
            totals = Totals()
        at = (run_id, step)
        totals = Totals.of((totals, *change(None, judgement, NOTHING)))
    if at is not None:
        yield at, totals


def _check_step(database: Database, run_id: str, step: int, totals: Totals) -> None:
    rows = database.all("SELECT mismatches, pending, body FROM steps WHERE run_id = ? AND step = ?", (run_id, step))
    counted = (totals.verdicts.get("mismatch", 0), totals.verdicts.get("pending", 0))
    if not rows or rows[0][:2] != counted or _plain(rows[0][2]) != _summable(totals):
        raise ChainError(f"the totals of run {run_id!r}, step {step} are not those of its samples")


def _check_run(database: Database, run_id: str, totals: Totals) -> None:
    if not run_id:
        return
    rows = database.all("SELECT body FROM runs WHERE run_id = ?", (run_id,))
    if not rows or _plain(rows[0][0]) != _summable(totals):
        raise ChainError(f"the totals of run {run_id!r} are not those of its samples")


def _plain(body: str) -> dict[str, Any]:
    return _summable(Totals.from_json(json.loads(body)))


def _summable(totals: Totals) -> dict[str, Any]:
    """Without what is not summed, and without zeros in tables of counts."""
    values = {name: getattr(totals, name) for name in totals.__slots__ if name not in _NOT_SUMMED}
    return {
        name: {k: count for k, count in value.items() if count} if isinstance(value, dict) else value
        for name, value in values.items()
    }
