"""What became of a client's records."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Counts:
    """Records by what became of them.

    accepted, duplicate, refused: by the auditor's receipts. queued: still in memory. spooled: waiting on disk now.
    dropped: lost, for neither the queue nor the spool had room, or the client was closed; by forked workers, too.
    """

    accepted: int = 0
    duplicate: int = 0
    refused: int = 0
    queued: int = 0
    spooled: int = 0
    dropped: int = 0

    def plus(self, **more: int) -> "Counts":
        """So many more of some."""
        return replace(self, **{name: getattr(self, name) + number for name, number in more.items()})
