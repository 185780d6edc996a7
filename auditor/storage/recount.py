"""Totals of older ledgers, brought in line with what they mean now."""

import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from auditor.storage.database import Database

_PAGE: Final = 2000


def forget_causes_of_not_comparable(database: "Database") -> None:
    """Causes are of mismatches. Earlier programs counted those of samples that could not be compared with them."""
    of_steps: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    of_runs: dict[str, Counter[str]] = defaultdict(Counter)
    after: tuple[str, int, str] = ("", -1, "")
    while True:
        rows = database.all(
            "SELECT run_id, step, sample_id, body FROM samples WHERE verdict = 'not_comparable'"
            " AND (run_id, step, sample_id) > (?, ?, ?) ORDER BY run_id, step, sample_id LIMIT ?",
            (*after, _PAGE),
        )
        for run_id, step, _, body in rows:
            cause = json.loads(body)["cause"]
            of_steps[run_id, step][cause] += 1
            of_runs[run_id][cause] += 1
        if len(rows) < _PAGE:
            break
        after = rows[-1][:3]
    for (run_id, step), counted in of_steps.items():
        where = ("run_id = ? AND step = ?", (run_id, step))
        _take_away(database, "steps", *where, counted)
    for run_id, counted in of_runs.items():
        _take_away(database, "runs", "run_id = ?", (run_id,), counted)


def _take_away(database: "Database", table: str, where: str, key: tuple[str | int, ...], counted: Counter[str]) -> None:
    ((body,),) = database.all(f"SELECT body FROM {table} WHERE {where}", key)
    totals = json.loads(body)
    left = {cause: count - counted[cause] for cause, count in totals["causes"].items()}
    totals["causes"] = {cause: count for cause, count in left.items() if count}
    database.run(f"UPDATE {table} SET body = ? WHERE {where}", (json.dumps(totals), *key))
