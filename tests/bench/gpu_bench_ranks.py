"""The tree all-reduce of two GPUs against NCCL: `python -m tests.bench.gpu_bench all_reduce` starts both ranks.

What is compared: ours takes fp32 partials and stores their sum in bf16. NCCL's bf16 all-reduce moves fewer bytes and
rounds the partials first, so its bits follow the number of ranks; its fp32 all-reduce moves what the contract needs.
"""

import json
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.bench.gpu_bench import Row
from tests.bench.graph_times import Op, captured

RANKS = 2
SIZES = tuple(4096 << shift for shift in (0, 2, 4, 6, 8, 9, 10, 11, 12, 13))  # values; 8 KB to 64 MB of bf16


def measure_together(*sides: list[Op], replays: int = 15) -> list[float]:
    """As `gpu_bench.measure`, on every rank; a small all-reduce before each replay lets the ranks start together."""
    graphs, start = [captured(calls) for calls in sides], torch.zeros(8, device="cuda")
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(replays):
        for graph, calls, found in zip(graphs, sides, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.all_reduce(start)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return [statistics.median(found) for found in times]


def _rows(rank: int) -> list[dict[str, object]]:
    from rl_kernel.ops.tree_all_reduce.triton_kernel import gathered, tree_all_reduce

    found: list[dict[str, object]] = []
    for n in SIZES:
        calls = 24 if n <= 1 << 21 else 6
        partials = [torch.randn(n, device="cuda") for _ in range(3)]
        halves = [p.bfloat16() for p in partials]
        wide = [p.clone() for p in partials]
        mine, hosts, bf16, fp32 = measure_together(
            [lambda p=partials[i % 3]: tree_all_reduce(p) for i in range(calls)],
            [lambda p=partials[i % 3]: gathered(p, None, torch.bfloat16) for i in range(calls)],
            [lambda p=halves[i % 3]: dist.all_reduce(p) for i in range(calls)],
            [lambda p=wide[i % 3]: dist.all_reduce(p) for i in range(calls)],
        )
        name, wire = f"{2 * n >> 10} KB", f"{3 * n / mine / 1e3:.0f} GB/s each way"
        for ours, peer, other, note in (
            (mine, "NCCL bf16", bf16, wire if n > 1 << 18 else ""),
            (mine, "NCCL fp32", fp32, ""),
            (hosts, "NCCL bf16", bf16, "ours through NCCL, as across hosts"),
        ):
            found.append({"name": name, "strict_us": ours, "peer": peer, "peer_us": other, "note": note})
    return found


def _rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl", meeting, rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank))
    torch.manual_seed(rank)
    found = _rows(rank)
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def all_reduce() -> list[Row]:
    """The rows of rank 0; none, and a line that says so, on a machine with one GPU."""
    if torch.cuda.device_count() < RANKS:
        print(f"tree all-reduce: not measured, needs {RANKS} GPUs; here {torch.cuda.device_count()}")
        return []
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (folder,), nprocs=RANKS, start_method="spawn")
        return [Row("tree all-reduce", **row) for row in json.loads(Path(folder, "rows").read_text())]
