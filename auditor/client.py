"""The door for engines and trainers: hand in records, go on working.

    with AuditClient("127.0.0.1:50051", "run-1", spool_dir=Path("spool")) as client:
        client.submit_rollout(rollout_record)
        client.submit_trainer(trainer_record)
        print(client.flush(timeout=10))

A background thread sends batches. While the auditor is away, or says that it is too much at once, batches wait on disk
and are sent when it takes them, also by a client that starts later. What could be neither sent nor stored is counted as
dropped and said at close.

In a process that is forked off from the one that made the client, `submit_*` puts a record on that disk before it
returns, for the client of the first process to send (`auditor.forks` says why).
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import grpc

from auditor.channel import MAX_MESSAGE_BYTES, Channel, batch_in
from auditor.codec import to_wire
from auditor.counts import Counts
from auditor.errors import RecordError
from auditor.forks import Losses, follow
from auditor.outbox import Outbox
from auditor.proto import audit_pb2 as pb
from auditor.records import Record, RolloutRecord, Side, TrainerRecord
from auditor.self_report import SelfReport
from auditor.sender import LONGEST_PAUSE_S, RETRY_S, RPC_TIMEOUT_S, Sender
from auditor.spool import Spool

__all__ = ["AuditClient", "Counts"]

log = logging.getLogger(__name__)

_LAST_WORD_S = 1.0


class AuditClient:
    """Reports records of one run. Thread-safe; `submit_*` never wait for the network.

    What is handed in faster than it can be sent goes to the spool: by the background thread, and past `queue_size`
    or `queue_bytes` by the caller itself, so that a burst costs some milliseconds of writing and no record.

    address: host:port of the auditor's gRPC. spool_dir: may be shared between clients. queue_size, queue_bytes: of what
    waits in memory. token: bearer token, where the auditor asks for one, or a function that gives the one in force.
    credentials: for TLS; None speaks plain text. spool_name: what logs call the folder instead of its path.
    ConfigError: an address that is no host:port, a bound below 0, a token that no call carries.
    """

    def __init__(
        self,
        address: str,
        run_id: str,
        *,
        spool_dir: Path | str,
        queue_size: int = 4096,
        queue_bytes: int = 256 << 20,
        token: str | Callable[[], str | None] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        spool_limit_bytes: int = 1 << 30,
        spool_name: str = "",
    ) -> None:
        channel = Channel(address, token, credentials)
        self.run_id = run_id
        self._queue = Outbox(queue_size, queue_bytes)
        self._spool = Spool(Path(spool_dir), spool_limit_bytes)
        self._spool_name = spool_name or str(spool_dir)
        self._self_report = SelfReport(run_id, self._spool.waits)
        self._sender = Sender(
            channel,
            self._self_report,
            address=address,
            waits_in=self._spool_name,
            count=self._count,
            dropped=lambda: self._counts.dropped,
            relieve=self._relieve_queue,
        )
        self._address = address
        self._counts, self._losses = Counts(), Losses()
        self._changed = threading.Condition()
        self._in_flight = 0
        self._on_their_way = 0  # from the queue to the spool
        # Batches of the shared spool that this client's token does not open, and when to try them again.
        self._not_ours: dict[Path, float] = {}
        self._closing = False
        self._in_child = False
        self._handed_in_here = False  # of a child
        follow(self)
        self._thread = threading.Thread(target=self._work, name="audit-client", daemon=True)
        self._thread.start()

    def submit_rollout(self, record: RolloutRecord) -> None:
        """Hand in what the engine computed. RecordError where the record belongs to another run."""
        self._put(record)

    def submit_trainer(self, record: TrainerRecord) -> None:
        """Hand in what the trainer's first forward computed. RecordError where the record belongs to another run."""
        self._put(record)

    @property
    def counts(self) -> Counts:
        """What became of the records so far. One that is on its way may show in two places, never in none."""
        self._hear_of_workers()
        # The spool before and after: records move between it, memory and the counts while nobody holds the lock.
        before = self._spool.waiting()
        with self._changed:
            queued = len(self._queue) + self._in_flight + self._on_their_way
            counts = self._counts
        return replace(counts, queued=queued, spooled=max(before, self._spool.waiting()))

    def flush(self, timeout: float) -> Counts:
        """Wait up to `timeout` seconds until nothing waits in memory or on disk; return the counts then."""
        deadline = time.monotonic() + timeout
        while True:
            counts = self.counts
            left = deadline - time.monotonic()
            if self._in_child and not self._handed_in_here:
                return counts  # what waits is the parent's
            if counts.queued + counts.spooled == 0 or left <= 0:
                return counts
            with self._changed:
                self._changed.wait(min(left, 0.05))

    def close(self, timeout: float = 10.0) -> Counts:
        """Flush, stop, and say in the log what the auditor did not get: it waits on disk for a later client."""
        counts = self.flush(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if not self._in_child:
            self._thread.join()
            self._sender.channel.close()
            self._leave_nothing_in_memory()
        counts = self.counts
        if not self._in_child:
            self._losses.close()
        waiting = 0 if self._in_child and not self._handed_in_here else counts.spooled
        if waiting or counts.dropped or counts.refused:
            log.warning("audit of run %s is incomplete: %d records wait in %s, %d were dropped, %d were refused",
                        self.run_id, waiting, self._spool_name, counts.dropped, counts.refused)  # fmt: skip
        return counts

    def __enter__(self) -> "AuditClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, record: Record) -> None:
        if record.run_id != self.run_id:
            raise RecordError(f"record of run {record.run_id!r} given to the client of run {self.run_id!r}")
        message = to_wire(record)
        size = message.ByteSize()
        if size > MAX_MESSAGE_BYTES - 64:
            self._count(refused=1)
            log.warning("record %s is %d bytes; the limit is %d", record.key, size, MAX_MESSAGE_BYTES)
            return
        self._self_report.of_side(record.side)
        with self._changed:
            if self._in_child:
                self._put_on_disk(message, record.side)
                return
            if self._closing:
                self._count(dropped=1)
                return
            self._queue.add(message, size)
            self._changed.notify_all()
        while self._queue.full:
            self._relieve_queue()

    def _put_on_disk(self, message: pb.Record, side: Side) -> None:
        """In a child: for its parent to send, who is told of what is lost here."""
        self._handed_in_here = True
        if self._closing:
            self._count(dropped=1)
        elif self._store(pb.SubmitRequest(batch=pb.Batch(records=[message]))):
            return
        self._losses.say(side)

    def forked(self) -> object:
        """Begin anew in a child: what was in memory is the parent's, as are its threads and its channel."""
        self._changed = threading.Condition()
        self._queue, self._counts = Outbox(0, 0), Counts()
        self._in_flight = self._on_their_way = 0
        self._in_child, self._handed_in_here = True, False
        return self._sender.channel

    def _leave_nothing_in_memory(self) -> None:
        """Store what is there although the thread has ended, as one does that met an error nobody thought of."""
        self._count(dropped=self._in_flight)
        while batch := self._take():
            self._store(pb.SubmitRequest(batch=pb.Batch(records=batch)))

    def _work(self) -> None:
        while True:
            self._hear_of_workers()
            self._gather()
            batch = self._take()
            if batch:
                self._deliver(batch)
            elif self._closing:
                self._tell(_LAST_WORD_S)
                return
            if not self._replay_some():
                self._tell()
                self._rest()

    def _gather(self) -> None:
        """While the auditor is away, what comes in half a second becomes one batch: small files are slow to send."""
        deadline = min(self._sender.away_until, time.monotonic() + RETRY_S)
        with self._changed:
            while not self._closing and not self._queue.half_full and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def _replay_some(self) -> bool:
        """Whether something of the spool went through; no trouble of a disk or a file ends the thread."""
        if self._closing or self._sender.pauses:
            return False
        try:
            return self._replay()
        except Exception:
            log.exception("%s could not be read; it is tried again", self._spool_name)
            self._sender.pause()
            return False

    def _tell(self, timeout: float = RPC_TIMEOUT_S) -> None:
        """Say how this client is where no batch says it: who was told of a full spool must hear of its end."""
        if self._sender.pauses or not self._self_report.due(self._counts.dropped):
            return
        try:
            self._sender.send(pb.SubmitRequest(batch=pb.Batch()), timeout)
        except Exception:
            log.exception("the auditor at %s could not be told how this client is", self._address)
            self._sender.pause()

    def _rest(self) -> None:
        """Wait a moment for work where there is none."""
        with self._changed:
            if not self._queue and not self._closing:
                self._changed.wait(RETRY_S)

    def _take(self) -> list[pb.Record]:
        """The next batch from the queue, empty where there is none."""
        with self._changed:
            batch = self._queue.take()
            self._in_flight = len(batch)
            return batch

    def _deliver(self, batch: list[pb.Record]) -> None:
        request = pb.SubmitRequest(batch=pb.Batch(records=batch))
        try:
            # After its time `close` waits for the disk alone, however much is in the queue.
            sent = not self._closing and not self._sender.pauses and self._sender.send(request)
        except Exception:
            log.exception("a batch for the auditor at %s could not be sent", self._address)
            sent = False
        if not sent:
            self._store(request)
        with self._changed:
            self._in_flight = 0
            self._changed.notify_all()

    def _replay(self) -> bool:
        """Send the oldest spooled batch; whether there was one and it went through."""
        now = time.monotonic()
        self._not_ours = {path: until for path, until in self._not_ours.items() if until > now}
        with self._spool.claim_oldest(self._not_ours) as claimed:
            if claimed is None:
                return False
            request = batch_in(claimed.payload) if claimed.whole else None
            if request is None:
                log.warning("%s is no batch, or not a whole one, and is set aside; %d records dropped",
                            claimed.path, claimed.records)  # fmt: skip
                with self._changed:  # nobody may see it gone from the disk and not yet counted
                    claimed.set_aside()
                    self._count(dropped=claimed.records)
                return True
            self._self_report.of_batch(request.batch)
            sent = self._sender.send(request)
            if sent:
                claimed.remove()
            elif self._sender.forbidden:
                self._not_ours[claimed.path] = now + LONGEST_PAUSE_S
        with self._changed:
            self._changed.notify_all()
        return sent

    def _relieve_queue(self) -> None:
        """Past half of its bound the queue goes to disk, so that a slow auditor costs no records."""
        with self._changed:
            if not self._queue.half_full:
                return
            batch = self._queue.take()
            self._on_their_way += len(batch)
        self._store(pb.SubmitRequest(batch=pb.Batch(records=batch)))
        with self._changed:
            self._on_their_way -= len(batch)
            self._changed.notify_all()

    def _store(self, request: pb.SubmitRequest) -> bool:
        """Whether it is on disk; what is not is counted as dropped."""
        request.batch.ClearField("client")  # it says how the client was then
        records = len(request.batch.records)
        try:
            stored = self._spool.put(request.SerializeToString(), records)
            reason = "the spool is full"
        except OSError as error:
            stored, reason = False, str(error)
        if not stored:
            self._count(dropped=records)
            log.warning("%d records dropped, %s: %s", records, self._spool_name, reason)
        return stored

    def _hear_of_workers(self) -> None:
        """What forked workers could not store is lost to this client, and said by it."""
        if not self._in_child:
            for side, lost in self._losses.heard().items():
                self._self_report.of_side(side)
                self._count(dropped=lost)

    def _count(self, **more: int) -> None:
        with self._changed:
            self._counts = self._counts.plus(**more)
