"""Counters in the device's memory by which the programs of one launch meet, and who has which."""

from dataclasses import dataclass, field

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ARENA = 1 << 21  # counters a device has; eager streams take theirs once, every captured launch takes its own
MOST_COLUMNS = 1 << 17  # of those, for the flags of `columns`, of an eager stream


@gluon.jit
def await_four(flag):  # type: ignore[no-untyped-def]
    """Every thread: until four have counted; the readers count too, and leave the flag at 0 mod 8."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .u32 seen;
            .reg .pred none;
        again:
            ld.acquire.gpu.global.u32 seen, [$1];
            and.b32 seen, seen, 4;
            setp.eq.u32 none, seen, 0;
            @none bra again;
            mov.u32 $0, seen;
        }
        """,
        "=r,l",
        [flag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@dataclass(slots=True)
class _Arena:
    """Counters of one device and who has them: `shares` maps a stream and a purpose to its own."""

    counters: torch.Tensor
    used: int = 0
    shares: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)

    def share(self, count: int) -> torch.Tensor | None:
        """`count` counters that nobody else has; None when there are no more."""
        if self.used + count > len(self.counters):
            return None
        self.used += count
        return self.counters[self.used - count : self.used]


_arenas: dict[int, _Arena] = {}


def _counters(device: torch.device, purpose: str, count: int, most: int) -> torch.Tensor:
    """`count` counters for one launch: of the `most` that the current stream has for the purpose.

    A launch that is being captured gets some of its own, since a graph may run beside eager launches of any stream.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    capturing = torch.cuda.is_current_stream_capturing()
    if index not in _arenas and not capturing:
        _arenas[index] = _Arena(torch.zeros(ARENA, dtype=torch.int32, device=device))
        torch.cuda.synchronize(device)  # other streams find them cleared
    arena = _arenas.get(index)
    found = None
    if arena is not None and capturing:
        found = arena.share(count)
    elif arena is not None:
        key = torch.cuda.current_stream(device).cuda_stream, purpose
        if key not in arena.shares and (fresh := arena.share(most)) is not None:
            arena.shares[key] = fresh
        found = arena.shares.get(key)
    # Without any left, a launch clears its own: slower, and as right.
    return torch.zeros(count, dtype=torch.int32, device=device) if found is None else found


def flags(device: torch.device, programs: int, most: int) -> torch.Tensor:
    """Two counters a program for one launch of at most `most` programs, 0 mod 8, as the launch leaves them."""
    return _counters(device, "flags", 2 * programs, 2 * most)


def queue(device: torch.device) -> torch.Tensor:
    """One counter for one launch, 0, as the launch leaves it."""
    return _counters(device, "queue", 1, 1)


def columns(device: torch.device, count: int) -> torch.Tensor:
    """`count` counters for one launch, 0 mod 8, as the launch leaves them."""
    if count > MOST_COLUMNS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    return _counters(device, "columns", count, MOST_COLUMNS)
