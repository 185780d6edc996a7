"""Run a function on several ranks, each in a process of its own, and collect what every rank returns."""

import multiprocessing as mp
import queue
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 300


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(rank, rendezvous, *arguments) on `size` ranks → their results, by rank; raises if one raises."""
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        processes = [
            context.Process(target=_run, args=(results, rank, rendezvous, function, arguments)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            found = dict(results.get(timeout=SECONDS) for _ in range(size))
        except queue.Empty:
            raise TimeoutError(f"a rank of {function.__name__} gave no result in {SECONDS} s") from None
        finally:
            for process in processes:
                process.join(timeout=20)
                if process.is_alive():
                    process.kill()
    for rank, result in sorted(found.items()):
        if isinstance(result, RankFailed):
            raise AssertionError(f"rank {rank}:\n{result}")
    return [found[rank] for rank in range(size)]


class RankFailed(str):
    """A rank's traceback."""


def _run(results: Any, rank: int, rendezvous: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    from rl_kernel.integrations.megatron.parallel import leave_tensor_parallel

    torch.set_num_threads(1)
    try:
        results.put((rank, function(rank, rendezvous, *arguments)))
    except Exception:  # noqa: BLE001 (the parent raises it)
        results.put((rank, RankFailed(traceback.format_exc())))
    leave_tensor_parallel()
