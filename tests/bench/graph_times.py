"""Times of GPU calls, ours and the peers' in turn: medians of CUDA-graph replays.

A peer that cannot be had on this machine, or that raises, is a line that says so and not the end of its section.
"""

import statistics
from collections.abc import Callable

import torch

Op = Callable[..., object]
Calls = list[Op]
AHEAD = 200_000  # cycles that the device spins, about 0.1 ms, while the graph behind them is launched
LONG = 30.0


def measure(*sides: Calls, replays: int = 15) -> list[float]:
    """Median microseconds a call of each side; their CUDA graphs are replayed in turn, at the same clocks."""
    return _replayed([(captured(calls), len(calls)) for calls in sides], replays)


def compared(where: str, mine: Calls, peers: dict[str, Calls], replays: int = 15) -> tuple[float, dict[str, float]]:
    """As `measure`: ours, and by name the peers that run. where: what a line about one that does not begins with."""
    graphs, able = [(captured(mine), len(mine))], []
    for name, calls in peers.items():
        try:
            calls[0]()  # what it compiles or refuses comes before a capture
            torch.cuda.synchronize()
            graphs.append((captured(calls), len(calls)))
        except Exception as error:  # noqa: BLE001  (whatever a peer raises)
            print(f"{where}: {name}: not measured, {_told(error)}", flush=True)
            continue
        able.append(name)
    strict, *others = _replayed(graphs, replays)
    return strict, dict(zip(able, others, strict=True))


def eager(where: str, call: Op, repeats: int = 5) -> float | None:
    """Median microseconds of a call that no graph can hold; None, and a line that says so, where it raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  (whatever a peer raises)
        print(f"{where}: not measured, {_told(error)}", flush=True)
        return None
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def captured(calls: Calls) -> torch.cuda.CUDAGraph:
    """One graph of all calls, replayed once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replayed(graphs: list[tuple[torch.cuda.CUDAGraph, int]], replays: int) -> list[float]:
    """Rounds of all graphs in turn, at least so many and at least for LONG milliseconds: clocks settle, noise evens."""
    times: list[list[float]] = [[] for _ in graphs]
    spent, turn = 0.0, 0
    while turn < replays or (spent < LONG and turn < 20 * replays):
        for (graph, calls), found in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD)  # else the time of a launch from Python is a part of what is measured
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            taken = begin.elapsed_time(end)
            spent += taken
            found.append(taken * 1e3 / calls)
        turn += 1
    return [statistics.median(found) for found in times]


def _told(error: Exception) -> str:
    """Kind and first line of what was raised."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
