"""Counts the strict calls that CUDA graphs replay, on the device and from inside the graphs.

A captured call runs no Python when its graph is replayed. So every piece of captured code ends with one more node,
which adds the piece's calls to counters on the device: what they hold is what the graphs really did. The graph also
says which kernels it holds (`kernels`), so that a foreign one cannot hide between ours.
"""

from collections import Counter
from typing import Final

import torch
import triton
import triton.language as tl

from rl_kernel.errors import EvidenceError
from rl_kernel.integrations.opaque.captured import kernels_of_capture

WIDTH: Final = 12  # functions that a plan may hand out


@triton.jit(do_not_specialize=[f"n{i}" for i in range(WIDTH)])
def tally_kernel(counts, n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11):  # type: ignore[no-untyped-def]
    """Add one number to each of the counters int64 [12]."""
    tl.store(counts + 0, tl.load(counts + 0) + n0)
    tl.store(counts + 1, tl.load(counts + 1) + n1)
    tl.store(counts + 2, tl.load(counts + 2) + n2)
    tl.store(counts + 3, tl.load(counts + 3) + n3)
    tl.store(counts + 4, tl.load(counts + 4) + n4)
    tl.store(counts + 5, tl.load(counts + 5) + n5)
    tl.store(counts + 6, tl.load(counts + 6) + n6)
    tl.store(counts + 7, tl.load(counts + 7) + n7)
    tl.store(counts + 8, tl.load(counts + 8) + n8)
    tl.store(counts + 9, tl.load(counts + 9) + n9)
    tl.store(counts + 10, tl.load(counts + 10) + n10)
    tl.store(counts + 11, tl.load(counts + 11) + n11)


class GraphTally:
    """Counters of one engine on `device`.

    kernels: capture → name of each kernel in that graph and how often, as of its last seal.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(WIDTH, dtype=torch.int64, device=device)
        self._noted = [0] * WIDTH
        self.kernels: dict[int, Counter[str]] = {}
        self._add()  # compiled and loaded here: neither may happen while a stream is captured

    def recording(self) -> bool:
        """Whether the current stream is being captured."""
        return bool(torch.cuda.is_current_stream_capturing())

    def note(self, cell: int) -> None:
        """Count a captured call in `cell`."""
        if cell >= WIDTH:
            raise EvidenceError(
                f"the plan hands out more than {WIDTH} functions; graph replays of more are not counted"
            )
        self._noted[cell] += 1

    def seal(self) -> None:
        """Add a node that counts what was noted since the last seal."""
        self._add()
        self._noted = [0] * WIDTH
        capture, names = kernels_of_capture(torch.cuda.current_stream().cuda_stream)
        self.kernels[capture] = names

    def read(self) -> list[int]:
        """Calls that graphs made since the last reset."""
        if any(self._noted):
            raise EvidenceError(
                f"{sum(self._noted)} strict calls were captured in a CUDA graph behind its last seal, so their replays "
                "are not counted; an op that should end the graph is missing"
            )
        counts: list[int] = self._counts.tolist()
        return counts

    def reset(self) -> None:
        """Set the counters to zero."""
        self._counts.zero_()

    def _add(self) -> None:
        tally_kernel[(1,)](self._counts, *self._noted, num_warps=1)
