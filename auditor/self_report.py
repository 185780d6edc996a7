"""What a client says of itself with each batch: what waits on its disk, and what it lost. For the auditor's metrics.

A client in another process than the auditor has no metrics of its own; and who learns of its losses from a log, learns
late.
"""

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable

from auditor.proto import audit_pb2 as pb
from auditor.records import Side

# Said again so often while something waits or was lost: the auditor forgets who says nothing for two minutes.
_AGAIN_S = 30.0
_MEASURED_S = 1.0


class SelfReport:
    """run_id: empty where a client sends other runs' records. spooled: records and bytes on disk, for which it is asked
    once a second at most. Thread-safe.
    """

    def __init__(
        self, run_id: str, spooled: Callable[[], tuple[int, int]], steady: Callable[[], float] = time.monotonic
    ) -> None:
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
        self.instance_id = f"{host or 'host'}-{os.getpid()}-{secrets.token_hex(4)}"
        self._run_id, self._spooled, self._steady = run_id, spooled, steady
        self._lock = threading.Lock()
        self._sides: set[Side] = set()
        self._measured: tuple[float, tuple[int, int]] | None = None
        self._told: tuple[float, pb.ClientState] | None = None

    def of_side(self, side: Side) -> None:
        """Note that a record of this side was handed in."""
        self._sides.add(side)

    def of_batch(self, batch: pb.Batch) -> None:
        """Note the sides of its records that are of this run: forked workers hand in on disk."""
        for record in batch.records:
            side: Side | None = record.WhichOneof("side")
            if side and getattr(record, side).common.run_id == self._run_id:
                self.of_side(side)

    def state(self, dropped: int) -> pb.ClientState | None:
        """The state now; None where there is nobody to speak for. dropped: records since this client's start."""
        if not (self._run_id and self._sides):
            return None
        records, size = self._measure()
        side = next(iter(self._sides)) if len(self._sides) == 1 else ""
        return pb.ClientState(
            instance_id=self.instance_id,
            run_id=self._run_id,
            side=side,
            spooled_records=records,
            spooled_bytes=size,
            dropped_records=dropped,
        )

    def due(self, dropped: int) -> bool:
        """Whether the state is to be told although no record is to be sent: it is another one than was told, or bad."""
        state = self.state(dropped)
        if state is None:
            return False
        bad = bool(state.spooled_records or state.dropped_records)
        if self._told is None:
            return bad
        at, told = self._told
        return state != told or (bad and self._steady() - at >= _AGAIN_S)

    def told(self, state: pb.ClientState) -> None:
        """Note that the auditor has this state."""
        self._told = (self._steady(), pb.ClientState.FromString(state.SerializeToString()))

    def _measure(self) -> tuple[int, int]:
        with self._lock:
            now = self._steady()
            if self._measured is None or now - self._measured[0] >= _MEASURED_S:
                try:
                    self._measured = (now, self._spooled())
                except OSError:  # what cannot be looked at must not keep records from being sent
                    self._measured = (now, (0, 0))
            return self._measured[1]
