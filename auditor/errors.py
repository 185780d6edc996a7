"""Every error that the auditor raises on purpose, and the stable code of each.

    AuditorError
    ├── ConfigError          a configuration that cannot be started from
    ├── RecordError          a record that is refused: it can never become right by trying again
    │   ├── ConflictError    another record is already stored under the same run, step, sample and side
    │   ├── LimitError       a record or batch beyond a size limit
    │   └── EvidenceError    a stored record that is not what was stored, as after a fault of the disk
    ├── AuthError            a call without the token that is asked for
    │   └── ForbiddenError   a token that does not cover the run
    ├── NoMethodError        a call of a method that there is not
    ├── RateError            more in too short a time; the same call may come again a little later
    ├── ArchiveError         retired evidence cannot be written away now; it stays in the ledger
    ├── LedgerError          the ledger cannot be written or read now; the same call may work later
    │   └── ChainError       the ledger's hash chain does not verify
    ├── RecomputeError       the reference could not be run on a sample
    └── NotFoundError        a run, step or sample that the ledger does not hold

`code` is what a receipt, a metric label or a problem document carries; docs/audit-protocol.md lists them.
"""

__all__ = [
    "ArchiveError",
    "AuditorError",
    "AuthError",
    "ChainError",
    "ConfigError",
    "ConflictError",
    "EvidenceError",
    "ForbiddenError",
    "LedgerError",
    "LimitError",
    "NoMethodError",
    "NotFoundError",
    "RateError",
    "RecomputeError",
    "RecordError",
]


class AuditorError(Exception):
    """Base of the tree. The message is one line: what is wrong, its value, what would be right."""

    code = "internal"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class ConfigError(AuditorError, ValueError):
    """A configuration that the auditor refuses to start from."""

    code = "config"


class RecordError(AuditorError, ValueError):
    """A record that is refused for good."""

    code = "malformed"


class ConflictError(RecordError):
    """A different record is already stored under the same run, step, sample and side."""

    code = "conflict"


class LimitError(RecordError):
    """A record or batch that is larger than the limits."""

    code = "too_large"


class EvidenceError(RecordError):
    """A stored record that is not what was stored."""

    code = "evidence_unreadable"


class AuthError(AuditorError):
    """A call without the bearer token that is asked for."""

    code = "unauthenticated"


class ForbiddenError(AuthError):
    """A token that is known and does not cover the run."""

    code = "forbidden_run"


class NoMethodError(AuditorError):
    """A gRPC call of a method that the service does not have."""

    code = "no_method"


class RateError(AuditorError):
    """More records, bytes or requests than one caller may send in the time. retry_after_s: when to try again."""

    code = "rate_limited"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ArchiveError(AuditorError):
    """The archive of retired evidence cannot be written at the moment."""

    code = "archive_unavailable"


class LedgerError(AuditorError):
    """The ledger cannot be written or read at the moment."""

    code = "ledger_unavailable"


class ChainError(LedgerError):
    """An entry of the ledger does not follow from the one before."""

    code = "chain_broken"


class RecomputeError(AuditorError):
    """The reference could not be run on a sample; the code says why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code)


class NotFoundError(AuditorError, LookupError):
    """A run, step or sample that the ledger does not hold."""

    code = "not_found"
