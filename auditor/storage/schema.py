"""Tables of the ledger and how an older one is brought up to date.

`entries` is append-only and chained; `records` and `verdicts` hold what it is about. `samples`, `steps`, `runs` and
`counters` are the present state, kept in the same transactions, so that no read has to add up history.
Types are written as {blob}, {real}, {integer} and {name} (text ordered by its bytes), which each database spells in its
own way. A step that SQL cannot say is a function of the database.
"""

from collections.abc import Callable
from typing import Any, Final

from auditor.storage.recount import forget_causes_of_not_comparable

MIGRATIONS: Final[tuple[tuple[str | Callable[[Any], None], ...], ...]] = (
    (
        """CREATE TABLE entries (
            seq {integer} PRIMARY KEY, kind TEXT NOT NULL, run_id {name} NOT NULL, step {integer} NOT NULL,
            sample_id {name} NOT NULL, digest {blob} NOT NULL, hash {blob} NOT NULL)""",
        """CREATE TABLE records (
            seq {integer} PRIMARY KEY, run_id {name} NOT NULL, step {integer} NOT NULL, sample_id {name} NOT NULL,
            side TEXT NOT NULL, digest {blob} NOT NULL, payload {blob}, received_at {real} NOT NULL)""",
        "CREATE UNIQUE INDEX records_by_sample ON records (run_id, step, sample_id, side)",
        """CREATE TABLE verdicts (
            seq {integer} PRIMARY KEY, run_id {name} NOT NULL, step {integer} NOT NULL, sample_id {name} NOT NULL,
            body TEXT NOT NULL)""",
        """CREATE TABLE samples (
            run_id {name} NOT NULL, step {integer} NOT NULL, sample_id {name} NOT NULL, verdict TEXT NOT NULL,
            reference TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (run_id, step, sample_id))""",
        "CREATE INDEX samples_by_verdict ON samples (run_id, verdict, step)",
        "CREATE INDEX samples_by_reference ON samples (reference) WHERE reference = 'queued'",
        """CREATE TABLE steps (
            run_id {name} NOT NULL, step {integer} NOT NULL, mismatches {integer} NOT NULL, pending {integer} NOT NULL,
            body TEXT NOT NULL, PRIMARY KEY (run_id, step))""",
        """CREATE TABLE reference_logprobs (
            run_id {name} NOT NULL, step {integer} NOT NULL, sample_id {name} NOT NULL, payload {blob} NOT NULL,
            PRIMARY KEY (run_id, step, sample_id))""",
        """CREATE TABLE sides (
            run_id {name} NOT NULL, side TEXT NOT NULL, newest_step {integer} NOT NULL, last_at {real} NOT NULL,
            PRIMARY KEY (run_id, side))""",
        """CREATE TABLE runs (
            run_id {name} PRIMARY KEY, first_at {real} NOT NULL, last_at {real} NOT NULL, body TEXT NOT NULL)""",
        """CREATE TABLE counters (
            name TEXT NOT NULL, labels TEXT NOT NULL, value {real} NOT NULL, PRIMARY KEY (name, labels))""",
    ),
    ("CREATE INDEX records_held ON records (received_at) WHERE payload IS NOT NULL",),
    # Evidence is retired in the order of the chain: a clock that was wrong for a while cannot make a record old.
    ("DROP INDEX records_held", "CREATE INDEX records_held_in_order ON records (seq) WHERE payload IS NOT NULL"),
    (forget_causes_of_not_comparable,),
    ("CREATE INDEX samples_pending ON samples (run_id, step, sample_id) WHERE verdict = 'pending'",),
    # Searches that have begun and not ended, so that one that ends the auditor does so a few times and not for ever.
    (
        """CREATE TABLE searches (
            run_id {name} NOT NULL, step {integer} NOT NULL, sample_id {name} NOT NULL, begun {integer} NOT NULL,
            PRIMARY KEY (run_id, step, sample_id))""",
    ),
    # How far what is written away of the chain has come, by what and where to.
    ("CREATE TABLE exports (name {name} PRIMARY KEY, seq {integer} NOT NULL)",),
)
VERSION: Final = len(MIGRATIONS)
