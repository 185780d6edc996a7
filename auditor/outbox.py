"""Records that wait in memory, bounded by their number and by their bytes."""

from collections import deque

from auditor.errors import ConfigError
from auditor.proto import audit_pb2 as pb

_BATCH_BYTES = 2 << 20
_BATCH_RECORDS = 256


class Outbox:
    """First in, first out; not locked. It takes what it is given: whoever fills it looks at `full` and takes out."""

    def __init__(self, most_records: int, most_bytes: int) -> None:
        if min(most_records, most_bytes) < 0:
            raise ConfigError(f"a queue of {most_records} records and {most_bytes} bytes; neither may be below 0")
        self._most_records, self._most_bytes = most_records, most_bytes
        self._waiting: deque[tuple[pb.Record, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Past one of its bounds."""
        return len(self._waiting) > self._most_records or self._bytes > self._most_bytes

    @property
    def half_full(self) -> bool:
        """At half of one of its bounds, and not empty."""
        if not self._waiting:
            return False
        return 2 * len(self._waiting) >= self._most_records or 2 * self._bytes >= self._most_bytes

    def add(self, record: pb.Record, size: int) -> None:
        """Append a record of `size` bytes on the wire."""
        self._waiting.append((record, size))
        self._bytes += size

    def take(self) -> list[pb.Record]:
        """The next batch: a single record where that is large already; empty where nothing waits."""
        batch: list[pb.Record] = []
        taken = 0
        while self._waiting and len(batch) < _BATCH_RECORDS:
            size = self._waiting[0][1]
            if batch and taken + size > _BATCH_BYTES:
                break
            batch.append(self._waiting.popleft()[0])
            taken += size
        self._bytes -= taken
        return batch
