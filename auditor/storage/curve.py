"""A run's curve in few points, however many steps it has: added up by the database, not by the reader."""

from dataclasses import dataclass
from typing import Final

from auditor.storage.database import number_at
from auditor.storage.reader import Reader

# How a bucket's steps are merged, and where in a step's body the number is.
_NUMBERS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("sum", ("compared_tokens",)),
    ("sum", ("mismatched_tokens",)),
    ("max", ("mismatched_tokens",)),
    ("sum", ("recomputed_tokens",)),
    ("sum", ("reference_differing",)),
    ("sum", ("samples",)),
    ("sum", ("verdicts", "not_comparable")),
    ("sum", ("drift", "tokens")),
    ("max", ("drift", "max_abs")),
)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Neighbouring steps as one point. incomplete: steps in which a sample waits for a side.

    mismatched_tokens: of all of them; most_mismatched: of the worst. max_abs: None where no two finite values were.
    """

    first_step: int
    last_step: int
    steps: int
    incomplete: int
    compared_tokens: int
    mismatched_tokens: int
    most_mismatched: int
    recomputed_tokens: int
    recomputed_mismatched: int
    samples: int
    not_comparable: int
    max_abs: float | None


def read_curve(reader: Reader, run_id: str, first: int, last: int, points: int) -> list[CurvePoint]:
    """At most `points` points over the steps first..last of a run, ascending; NotFoundError without the run."""
    run = reader.run(run_id)
    if run.first_step is None or run.last_step is None:
        return []
    first, last = max(first, run.first_step), min(last, run.last_step)
    width = max(1, -(-(last - first + 1) // points))
    database = reader.database
    numbers = ", ".join(f"{merge}({number_at(database, 'body', *path)})" for merge, path in _NUMBERS)
    rows = database.all(
        "SELECT min(step), max(step), count(*), sum(CASE WHEN pending > 0 THEN 1 ELSE 0 END),"
        f" {numbers} FROM steps WHERE run_id = ? AND step >= ? AND step <= ?"
        " GROUP BY (step - ?) / ? ORDER BY 1",
        (run_id, first, last, first, width),
    )
    return [_point(*row) for row in rows]


def _point(first: int, last: int, *numbers: float | None) -> CurvePoint:
    *counts, finite, max_abs = numbers
    steps, incomplete, compared, mismatched, worst, recomputed, differing, samples, not_comparable = (
        int(count or 0) for count in counts
    )
    return CurvePoint(
        first_step=first,
        last_step=last,
        steps=steps,
        incomplete=incomplete,
        compared_tokens=compared,
        mismatched_tokens=mismatched,
        most_mismatched=worst,
        recomputed_tokens=recomputed,
        recomputed_mismatched=differing,
        samples=samples,
        not_comparable=not_comparable,
        max_abs=max_abs if finite else None,
    )
