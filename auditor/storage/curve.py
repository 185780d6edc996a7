"""A run's curve in few points, however many steps it has: added up by the database, not by the reader."""

from dataclasses import dataclass

from auditor.storage.reader import Reader

# Where in a step's body a number is; json_extract reads it without decoding the rest.
_SUM = "sum(json_extract(body, '$.{}'))"
_MAX = "max(json_extract(body, '$.{}'))"
_CURVE = (
    "SELECT min(step), max(step), count(*), sum(pending > 0), "
    + ", ".join(
        (
            _SUM.format("compared_tokens"),
            _SUM.format("mismatched_tokens"),
            _MAX.format("mismatched_tokens"),
            _SUM.format("recomputed_tokens"),
            _SUM.format("reference_differing"),
            _SUM.format("samples"),
            _SUM.format("verdicts.not_comparable"),
            _MAX.format("drift.max_abs"),
        )
    )
    + " FROM steps WHERE run_id = ? AND step >= ? AND step <= ? GROUP BY (step - ?) / ? ORDER BY 1"
)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Neighbouring steps as one point. incomplete: steps in which a sample waits for a side.

    mismatched_tokens: of all of them; most_mismatched: of the worst. max_abs: None where nothing was compared.
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
    rows = reader.database.all(_CURVE, (run_id, first, last, first, width))
    return [_point(*row) for row in rows]


def _point(
    first: int,
    last: int,
    steps: int,
    incomplete: int,
    compared: int,
    mismatched: int,
    worst: int,
    recomputed: int,
    differing: int,
    samples: int,
    not_comparable: int | None,
    max_abs: float,
) -> CurvePoint:
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
        not_comparable=not_comparable or 0,
        max_abs=max_abs if compared else None,
    )
