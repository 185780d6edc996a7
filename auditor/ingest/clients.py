"""What clients say of themselves, as sums over those of a run and side, for as long as they go on saying it."""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from auditor.proto import audit_pb2 as pb

# Four times as long as a client of this project takes between two words of what is amiss.
_GONE_S: Final = 120.0
# One that ended and left records on a disk, or lost some, is told of for longer than an alert waits before it rings.
_MISSED_S: Final = 900.0
_MOST: Final = 4096
_NAME: Final = re.compile(r"[A-Za-z0-9._:@+=-]{1,128}")
_SIDES: Final[Mapping[str, str]] = {"rollout": "rollout", "trainer": "trainer", "": "both"}


@dataclass(frozen=True, slots=True)
class Waiting:
    """Added up over so many clients that were heard of lately."""

    clients: int = 0
    spooled_records: int = 0
    spooled_bytes: int = 0
    dropped_records: int = 0


class Clients:
    """Thread-safe; so many clients at most, those that were heard of last. steady: seconds by a clock without jumps.

    shown_runs: of so many runs it is told what their clients say, those that were heard of last: any name can be said.
    """

    def __init__(self, shown_runs: int, steady: Callable[[], float] = time.monotonic) -> None:
        self._shown_runs, self._steady = shown_runs, steady
        self._lock = threading.Lock()
        # run and instance → side, when it was heard of, and its last word
        self._heard: OrderedDict[tuple[str, str], tuple[str, float, Waiting]] = OrderedDict()

    def hear(self, state: pb.ClientState) -> bool:
        """Take in what a client says; False where a name in it is none."""
        side = _SIDES.get(state.side)
        if side is None or not (_NAME.fullmatch(state.run_id) and _NAME.fullmatch(state.instance_id)):
            return False
        said = Waiting(1, state.spooled_records, state.spooled_bytes, state.dropped_records)
        with self._lock:
            self._heard[state.run_id, state.instance_id] = (side, self._steady(), said)
            self._heard.move_to_end((state.run_id, state.instance_id))
            while len(self._heard) > _MOST:
                self._heard.popitem(last=False)
        return True

    def waiting(self) -> dict[tuple[str, str], Waiting]:
        """By run and side (`rollout`, `trainer`, `both`), of the clients that are not gone."""
        found: dict[tuple[str, str], Waiting] = {}
        with self._lock:
            now = self._steady()
            for client, (_, heard, said) in list(self._heard.items()):
                if now - heard > (_MISSED_S if said.spooled_records or said.dropped_records else _GONE_S):
                    del self._heard[client]
            shown: set[str] = set()
            for (run_id, _), (side, _, said) in reversed(self._heard.items()):
                if len(shown) == self._shown_runs and run_id not in shown:
                    continue
                shown.add(run_id)
                before = found.get((run_id, side), Waiting())
                found[run_id, side] = Waiting(
                    before.clients + said.clients,
                    before.spooled_records + said.spooled_records,
                    before.spooled_bytes + said.spooled_bytes,
                    before.dropped_records + said.dropped_records,
                )
        return found
