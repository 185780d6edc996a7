"""One batch to the auditor, and what became of its records.

Whatever goes wrong is said once in the log, and how long to wait before the next attempt is remembered.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

import grpc

from auditor.channel import MAX_MESSAGE_BYTES, REFUSED_FOR_GOOD, TOO_LARGE, Channel, pause_of
from auditor.proto import audit_pb2 as pb
from auditor.self_report import SelfReport

# Whoever hands records in knows the client, whose log this is.
log = logging.getLogger("auditor.client")

RETRY_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
RPC_TIMEOUT_S: Final = 10.0
_ROOM_FOR_STATE: Final = 1 << 20


class Tally(Protocol):
    """Counts what became of records, by outcome."""

    def __call__(self, *, accepted: int = 0, duplicate: int = 0, refused: int = 0) -> None:
        """So many more."""


class Sender:
    """For one thread at a time.

    address, waits_in: what logs call the auditor, and where records wait. dropped: how many records the client has lost
    so far. relieve: is called again and again while the auditor hesitates. forbidden: whether the last batch was one
    that this token does not open.
    """

    def __init__(
        self,
        channel: Channel,
        report: SelfReport,
        *,
        address: str,
        waits_in: str,
        count: Tally,
        dropped: Callable[[], int],
        relieve: Callable[[], None],
    ) -> None:
        self.channel = channel
        self.forbidden = False
        self._report = report
        self._address, self._waits_in = address, waits_in
        self._count, self._dropped, self._relieve = count, dropped, relieve
        self._away = False
        self.away_until = 0.0

    @property
    def pauses(self) -> bool:
        """Whether it is too early to try again."""
        return time.monotonic() < self.away_until

    def pause(self) -> None:
        """Try again in a moment."""
        self.away_until = time.monotonic() + RETRY_S

    def send(self, request: pb.SubmitRequest, timeout: float = RPC_TIMEOUT_S) -> bool:
        """Whether the auditor gave a receipt for every record; what waits is relieved while it hesitates."""
        state = self._stated(request)
        call = self.channel.submit(request, timeout)
        while not call.done():
            try:
                call.exception(timeout=0.1)
            except grpc.FutureTimeoutError:
                self._relieve()
        error = call.exception()
        self.forbidden = error is not None and call.code() is grpc.StatusCode.PERMISSION_DENIED
        if error is not None and call.code() in REFUSED_FOR_GOOD:
            log.warning("auditor at %s refused a batch: %s", self._address, call.details())
            self._count(refused=len(request.batch.records))
            return True
        if error is not None and TOO_LARGE in (call.details() or ""):
            return self._send_in_halves(request)
        if error is not None:
            self.away_until = time.monotonic() + pause_of(call, RETRY_S, LONGEST_PAUSE_S)
            if not self._away:
                log.warning("auditor at %s takes no records (%s: %s); they wait in %s",
                            self._address, call.code(), call.details(), self._waits_in)  # fmt: skip
            self._away = True
            return False
        if self._away:
            log.warning("auditor at %s takes records again", self._address)
        self._away = False
        receipts = call.result().receipts
        if len(receipts.receipts) != len(request.batch.records):
            # What became of which record cannot be told. Sent again, those that were stored are duplicates.
            log.warning("auditor at %s gave %d receipts for %d records", self._address, len(receipts.receipts),
                        len(request.batch.records))  # fmt: skip
            self.away_until = time.monotonic() + LONGEST_PAUSE_S
            return False
        if state is not None:
            self._report.told(state)
        self._tally(receipts)
        return True

    def _stated(self, request: pb.SubmitRequest) -> pb.ClientState | None:
        """How this client is, put into the request too; None where that cannot be said, or finds no room."""
        records = request.batch.records
        state = self._report.state(self._dropped())
        if state is None or (len(records) == 1 and records[0].ByteSize() > MAX_MESSAGE_BYTES - _ROOM_FOR_STATE):
            return None
        request.batch.client.CopyFrom(state)
        return state

    def _send_in_halves(self, request: pb.SubmitRequest) -> bool:
        """A batch that is larger than this auditor takes at once; a single record of that size is refused for good."""
        records = request.batch.records
        if len(records) == 1:
            log.warning("the auditor at %s takes no record of %d bytes", self._address, records[0].ByteSize())
            self._count(refused=1)
            return True
        middle = len(records) // 2
        halves = (pb.SubmitRequest(batch=pb.Batch(records=part)) for part in (records[:middle], records[middle:]))
        return all(self.send(half) for half in halves)

    def _tally(self, receipts: pb.Receipts) -> None:
        outcomes = [receipt.outcome for receipt in receipts.receipts]
        for receipt in receipts.receipts:
            if receipt.outcome == pb.OUTCOME_REFUSED:
                log.warning("auditor refused a record: %s: %s", receipt.code, receipt.detail)
        self._count(
            accepted=outcomes.count(pb.OUTCOME_ACCEPTED),
            duplicate=outcomes.count(pb.OUTCOME_DUPLICATE),
            refused=outcomes.count(pb.OUTCOME_REFUSED),
        )
