"""Memory that the GPUs of one host map from each other, and the tree over ranks through it.

A group gets its memory at its first call, which all ranks make together and outside a CUDA graph. Calls of one group
must follow each other in one order on every rank, as with any collective: one stream, or streams that wait.
"""

import socket
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from rl_kernel.errors import PlanError
from rl_kernel.ops.accelerator import cdiv, multiprocessors
from rl_kernel.ops.tree_all_reduce.triton_symmetric import SLOTS, one_shot_kernel, two_shot_kernel
from rl_kernel.ops.tree_all_reduce.triton_trimmed import trimmed_kernel

MAX_RANKS = 8
ONE_SHOT = 1 << 17  # values up to which one shot may serve, by two ranks
ONE_SHOT_BLOCK, ONE_SHOT_WARPS = 512, 4
BLOCK, WARPS = 4096, 4  # values of a chunk of two shots, by two ranks
PROGRAMS_PER_PROCESSOR = 4
FINER = 2  # trimmed, so many times the programs, with chunks as many times smaller
TRIMMED = 1 << 21  # values from which two ranks that want bf16 send 22.5 bits of 32, and ask for the rest if it counts


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's memory, in bytes from its start: the words of one shot, slots for partials and for sums, flags."""

    ranks: int
    programs: int

    @property
    def capacity(self) -> int:
        """Values that one shot carries: the fewer, the more ranks send."""
        return ONE_SHOT // (self.ranks - 1) // ONE_SHOT_BLOCK * ONE_SHOT_BLOCK

    @property
    def block(self) -> int:
        """Values of a chunk of two shots: all ranks' chunks stand in registers together."""
        return 2 * BLOCK // self.ranks

    @property
    def sums(self) -> int:
        """Start of the slots of partials, fp32[programs, SLOTS, ranks, block]."""
        return 2 * self.ranks * self.capacity * 8

    @property
    def whole(self) -> int:
        """Start of the whole partials that the one peer may ask for: trimmed ones leave half of the slots."""
        return self.sums + self._slots // 2

    @property
    def results(self) -> int:
        """Start of the slots of finished sums, of the output type."""
        return self.sums + self._slots

    @property
    def flags(self) -> int:
        """Start of the flags, int32[FINER * programs, ranks]."""
        return self.results + self._slots

    @property
    def size(self) -> int:
        """All of it."""
        return self.flags + FINER * self.programs * self.ranks * 4

    @property
    def _slots(self) -> int:
        return self.programs * int(SLOTS.value) * self.ranks * self.block * 4


@dataclass(slots=True, eq=False)
class Peers:
    """One rank's view: the addresses of every rank's memory, and what this rank has counted. `owned` keeps it mapped.

    bases: int64[R]; shots and turns: int32, one a program.
    """

    layout: Layout
    rank: int
    bases: torch.Tensor
    shots: torch.Tensor
    turns: torch.Tensor
    owned: object

    @classmethod
    def of(cls, layout: Layout, rank: int, addresses: list[int], device: torch.device, owned: object) -> "Peers":
        """Counters start at zero, as all memory of the group must."""
        bases = torch.tensor(addresses, dtype=torch.int64, device=device)
        shots = torch.zeros(layout.capacity // ONE_SHOT_BLOCK, dtype=torch.int32, device=device)
        turns = torch.zeros(FINER * layout.programs, dtype=torch.int32, device=device)
        return cls(layout, rank, bases, shots, turns, owned)

    def all_reduce(self, partial: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """partial: fp32, contiguous → its tree sum over the ranks. Which kernel runs follows from the size alone."""
        y = torch.empty(partial.shape, dtype=out_dtype, device=partial.device)
        n, ranks, fp32 = partial.numel(), self.layout.ranks, out_dtype == torch.float32
        if 0 < n <= self.layout.capacity:
            one_shot_kernel[(cdiv(n, ONE_SHOT_BLOCK),)](
                y, partial, self.bases, self.shots, n, self.rank,
                RANKS=ranks, CAPACITY=self.layout.capacity, BLOCK=ONE_SHOT_BLOCK, FP32=fp32,
                num_warps=ONE_SHOT_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        elif n:
            trimmed = ranks == 2 and not fp32 and n >= TRIMMED
            finer = FINER if trimmed else 1
            part, block = cdiv(n, 16 * ranks) * 16, self.layout.block // finer
            programs = min(cdiv(part, block), finer * self.layout.programs)
            arguments = (y, partial, self.bases, self.turns, n, part, cdiv(part, programs * block), self.rank)
            where = {"SUMS": self.layout.sums, "RESULTS": self.layout.results, "FLAGS": self.layout.flags}
            how = {"num_warps": WARPS, "num_stages": 1, "maxnreg": _registers(finer), "enable_fp_fusion": False}
            if trimmed:
                how |= {"LANES": 32 * WARPS, "WHOLE": self.layout.whole}
                trimmed_kernel[(programs,)](*arguments, BLOCK=block, **where, **how)
            else:
                two_shot_kernel[(programs,)](*arguments, RANKS=ranks, BLOCK=block, FP32=fp32, **where, **how)
        return y


def _registers(finer: int) -> int:
    """The most a thread may have for all programs to be on the device together, since they wait for each other."""
    return 65536 // (finer * PROGRAMS_PER_PROCESSOR * WARPS * 32) // 8 * 8


_peers: "WeakKeyDictionary[dist.ProcessGroup, Peers | None]" = WeakKeyDictionary()


def peers(group: dist.ProcessGroup, device: torch.device) -> Peers | None:
    """The group's shared memory, made at the first call; None where its ranks cannot map each other's memory."""
    if group not in _peers:
        if torch.cuda.is_current_stream_capturing():
            raise PlanError(
                "tree_all_reduce: a group's first call sets up the memory that its ranks share, which a CUDA graph "
                "cannot capture; call it once before the capture"
            )
        _peers[group] = _meet(group, device) if _on_one_host(group, device) else None
    return _peers[group]


def _on_one_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every rank sits on the same host and can map the memory of all others: the same answer on all."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
    everyone: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (host, device.index), group=group)
    devices = [index for _, index in everyone]
    if len({name for name, _ in everyone}) > 1 or len(everyone) > MAX_RANKS:
        return False
    visible = torch.cuda.device_count()
    able = len(set(devices)) == len(devices) and all(
        index == device.index or (index < visible and torch.cuda.can_device_access_peer(device.index, index))
        for index in devices
    )
    agreed = [False] * len(everyone)
    dist.all_gather_object(agreed, able, group=group)
    return all(agreed)


def _meet(group: dist.ProcessGroup, device: torch.device) -> Peers:
    ranks = dist.get_world_size(group)
    layout = Layout(ranks, PROGRAMS_PER_PROCESSOR * multiprocessors(device.index))
    memory = symmetric_memory.empty(layout.size, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(memory, group)
    memory.zero_()
    addresses = [handle.get_buffer(r, (1,), torch.uint8).data_ptr() for r in range(ranks)]
    found = Peers.of(layout, dist.get_rank(group), addresses, device, (memory, handle))
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody pushes into memory that is still being cleared
    torch.cuda.synchronize(device)
    return found
