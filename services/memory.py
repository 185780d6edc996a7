"""Peak memory of a tree of processes, each shared page counted once: the sum of proportional set sizes."""

import threading

import psutil

_PERIOD_SECONDS = 1.0


class PeakMemory:
    """Samples this process and all its descendants once a second, on a thread of its own, until `stop`."""

    def __init__(self) -> None:
        self._peak = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stop sampling and return the peak in bytes."""
        self._stopping.set()
        self._thread.join()
        return self._peak

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, tree_bytes(psutil.Process()))
            if self._stopping.wait(_PERIOD_SECONDS):
                return


def tree_bytes(root: psutil.Process) -> int:
    """Proportional set size of `root` and its descendants, in bytes. A process that ends meanwhile counts as 0."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total
