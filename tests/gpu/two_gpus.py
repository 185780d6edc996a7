"""What two ranks check together, a process and a GPU each: every function runs on both, and raises where bits differ.

`run` starts the ranks, and returns what went wrong, check by check. Each rank computes what one rank would, too.
"""

import json
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rl_kernel.contracts import model_contract
from rl_kernel.errors import PlanError
from rl_kernel.integrations.megatron.logp import LinearLogp
from rl_kernel.ops import strict_plan
from rl_kernel.reference import ops as law
from rl_kernel.torch_autograd import StrictOps, TensorParallel, split_qkv
from tests.contracts.subjects import to_numpy
from tests.gpu.tensors import normal, offsets, same_as_reference, same_bits

SECONDS = 240
RANKS = 2
DTYPES = (torch.bfloat16, torch.float32)


def patterns(n: int, rank: int, seed: int = 0) -> torch.Tensor:
    """fp32 of random bits: every kind of NaN, infinities, subnormals, both zeros."""
    generator = torch.Generator("cuda").manual_seed(seed * 64 + rank)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator, device="cuda", dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def expected_sum(n: int, seed: int, dtype: torch.dtype) -> np.ndarray:
    """What the reference makes of all ranks' patterns."""
    total = law.tree_sum(np.stack([to_numpy(patterns(n, r, seed)) for r in range(RANKS)]))
    return law.narrow(total) if dtype == torch.bfloat16 else law.canonical(total)


def sums_have_the_bits_of_the_reference(rank: int) -> None:
    from rl_kernel.ops.tree_all_reduce.symmetric import ONE_SHOT
    from rl_kernel.ops.tree_all_reduce.triton_kernel import gathered, transport, tree_all_reduce

    assert transport(None, torch.device("cuda", rank)) == "symmetric memory"
    sizes = (1, 511, 512, 513, 4096, ONE_SHOT, ONE_SHOT + 1, 3 * 333 * 1001, 1 << 20, (1 << 21) + 2, 1 << 23)
    for seed, n in enumerate(sizes):
        for dtype in DTYPES:
            want = expected_sum(n, seed, dtype)
            same_as_reference(tree_all_reduce(patterns(n, rank, seed), None, dtype), want, f"{n} values, {dtype}")
            same_as_reference(gathered(patterns(n, rank, seed), None, dtype), want, f"{n} values gathered, {dtype}")
    # As layers have them: of random bits nearly all are asked for where 22.5 travel, of these few.
    parts = [normal(1 << 23, seed=r, dtype=torch.float32) for r in range(RANKS)]
    want = law.narrow(law.tree_sum(np.stack([to_numpy(p) for p in parts])))
    same_as_reference(tree_all_reduce(parts[rank]), want, "partials of a normal distribution")


def a_partial_of_any_shape_and_alignment_is_summed(rank: int) -> None:
    from rl_kernel.ops.tree_all_reduce.triton_kernel import tree_all_reduce

    assert tree_all_reduce(torch.empty((0, 4), device="cuda")).shape == (0, 4)
    for shape, start in (((3, 5, 7), 0), ((1000, 999), 1)):
        count = int(np.prod(shape))
        whole = [patterns(count + start, r, 5) for r in range(RANKS)]
        parts = [w[start:].view(shape) for w in whole]
        found = tree_all_reduce(parts[rank], None, torch.float32)
        assert found.shape == shape
        same_as_reference(found, law.canonical(law.tree_sum(np.stack([to_numpy(p) for p in parts]))), f"{shape}")


def many_calls_of_mixed_sizes_without_waiting(rank: int) -> None:
    from rl_kernel.ops.tree_all_reduce.triton_kernel import tree_all_reduce
    from rl_kernel.ops.triton_tree import tree_sum

    random = np.random.default_rng(7)
    sizes = [int(2 ** random.uniform(0, 23.5)) for _ in range(150)]
    inputs = [[patterns(n, r, 100 + i) for r in range(RANKS)] for i, n in enumerate(sizes)]
    torch.cuda.synchronize()
    if rank:
        torch.cuda._sleep(20_000_000)  # one rank starts late: nothing may depend on their pace
    found = []
    for i, parts in enumerate(inputs):
        found.append(tree_all_reduce(parts[rank], None, DTYPES[i % 2]))
        if random.random() < 0.1 and i % 2 == rank:
            torch.cuda._sleep(1_000_000)
    for i, (parts, y) in enumerate(zip(inputs, found, strict=True)):
        same_bits(y, tree_sum(torch.stack(parts), DTYPES[i % 2]), f"call {i}, {sizes[i]} values")


def a_graph_replays_the_bits_with_new_values(rank: int) -> None:
    from rl_kernel.ops.tree_all_reduce.triton_kernel import tree_all_reduce
    from rl_kernel.ops.triton_tree import tree_sum

    sizes = (4096, 1 << 20, 100, 5_000_000)
    held = [patterns(n, rank, 50) for n in sizes]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in held:
            tree_all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [tree_all_reduce(x) for x in held] + [tree_all_reduce(x) for x in held]
    for replay in range(12):
        parts = [[patterns(n, r, 60 + replay) for r in range(RANKS)] for n in sizes]
        for x, both in zip(held, parts, strict=True):
            x.copy_(both[rank])
        graph.replay()
        if replay % 3 == 0:  # an eager call between replays
            tree_all_reduce(held[0])
        torch.cuda.synchronize()
        for i, y in enumerate(outputs):
            same_bits(y, tree_sum(torch.stack(parts[i % 4])), f"replay {replay}, output {i}")


def a_group_that_first_meets_in_a_capture_is_refused(rank: int) -> None:
    from rl_kernel.ops.tree_all_reduce.triton_kernel import tree_all_reduce

    group, x = dist.new_group([0, 1]), patterns(10, rank)
    assert group is not None
    said = ""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        try:
            tree_all_reduce(x, group)
        except PlanError as error:
            said = str(error)
    assert "call it once before the capture" in said, said
    tree_all_reduce(x, group)


HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB = 1024, 3072, 16, 8, 64, 8192


class Layer:
    """One decoder layer at width HIDDEN: the shards of `rank` of `size`, cut from the same whole weights."""

    def __init__(self, segments: int, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.plan = strict_plan(model_contract("sm90", segments=segments), "cuda")
        self.ops = StrictOps(self.find, segments, TensorParallel(rank, size, group))
        self.rank, self.size = rank, size
        qkv = normal(KV_HEADS, (HEADS // KV_HEADS + 2) * DIM, HIDDEN, seed=1, scale=0.03)
        gate_up = normal(2, segments, FFN // segments, HIDDEN, seed=2, scale=0.03).transpose(0, 1)  # a block a segment
        whole = {
            "qkv": self.cut(qkv, 0).reshape(-1, HIDDEN),
            "o": self.cut(normal(HIDDEN, HEADS * DIM, seed=3, scale=0.03), 1),
            "gate_up": self.cut(gate_up, 0).reshape(-1, HIDDEN),
            "down": self.cut(normal(HIDDEN, FFN, seed=4, scale=0.03), 1),
            "head": self.cut(normal(VOCAB, HIDDEN, seed=5, scale=0.05), 0),
        }
        self.weights = {name: torch.nn.Parameter(w.contiguous()) for name, w in whole.items()}
        for i, w in enumerate(self.weights.values()):
            # A chain continues from what is there: the same number everywhere, so that nothing needs cutting.
            w.main_grad = torch.full(w.shape, 0.001 * (i + 1), device="cuda")  # type: ignore[attr-defined]
        self.gain, self.dgain = normal(HIDDEN, seed=6), torch.zeros((1, HIDDEN), device="cuda")

    def find(self, op: str, name: str) -> Callable[..., Any]:
        return self.plan.resolve(op).function(name)

    def cut(self, w: torch.Tensor, axis: int) -> torch.Tensor:
        return w.chunk(self.size, axis)[self.rank]

    def hidden(self, x: torch.Tensor, cu: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ops = self.ops
        cos, sin = (normal(len(x), DIM // 2, seed=s, dtype=torch.float32) for s in (7, 8))
        normed = ops.norm(x, self.gain, 1e-6, self.dgain)
        q, k, v = split_qkv(ops.column_linear(normed, self.weights["qkv"]), KV_HEADS // self.size, DIM)
        q, k = (ops.rotate(a, cos, sin, positions) for a in (q, k))
        attended = ops.self_attention(q, k, v, cu).reshape(x.shape[0], -1)
        x = ops.add(ops.row_linear(attended, self.weights["o"]), x)
        both = ops.column_linear(ops.norm(x, self.gain, 1e-6, self.dgain), self.weights["gate_up"])
        pairs = ops.swiglu_activation(both.view(len(both) * ops.segments, -1))
        return ops.add(ops.row_linear(pairs.view(len(both), -1), self.weights["down"]), x)

    def results(self, tokens: int) -> Iterator[tuple[str, int | None, torch.Tensor]]:
        """(name, the axis along which ranks hold shards or None, tensor) of the forward and of every gradient."""
        x = normal(tokens, HIDDEN, seed=10).requires_grad_()
        cu, positions = offsets(tokens // 3, tokens - tokens // 3), torch.arange(tokens, device="cuda")
        h = self.hidden(x, cu, positions)
        yield "hidden", None, h.detach()
        head, target = self.weights["head"], torch.arange(tokens, device="cuda") * 4001 % 8100
        logp = LinearLogp(self.ops, self.find, self.rank * (VOCAB // self.size), 8100)
        found, lse = logp.forward(h.detach(), head.detach(), target, 0.8)
        yield "logp", None, found
        dlogp = normal(tokens, seed=11, dtype=torch.float32)
        dh = logp.backward(dlogp, h.detach(), head.detach(), target, lse, 0.8, head.main_grad)
        yield "dh", None, dh
        h.backward(dh)
        assert x.grad is not None
        yield "dx", None, x.grad
        yield "norm", None, self.dgain
        axes = {"qkv": 0, "o": 1, "gate_up": 0, "down": 1, "head": 0}
        for name, w in self.weights.items():
            yield name, axes[name], w.main_grad


def two_ranks_give_the_bits_of_one_forward_and_backward(rank: int) -> None:
    for segments, tokens in ((2, 65), (8, 65), (8, 600)):
        assert not any(bool(t.isnan().any()) for _, _, t in Layer(segments, 0, 1, None).results(tokens))
        one = list(Layer(segments, 0, 1, None).results(tokens))
        two = list(Layer(segments, rank, RANKS, dist.group.WORLD).results(tokens))
        for (name, axis, whole), (_, _, mine) in zip(one, two, strict=True):
            share = whole if axis is None else whole.chunk(RANKS, axis)[rank].contiguous()
            same_bits(mine.contiguous(), share, f"{name}, segments {segments}, {tokens} tokens")


def one_segment_would_have_other_bits(rank: int) -> None:
    """What the segments are for, and what shows that the check above can fail."""
    one = next(iter(Layer(1, 0, 1, None).results(65)))[2]
    two = next(iter(Layer(2, rank, RANKS, dist.group.WORLD).results(65)))[2]
    assert bool((one.view(torch.int16) != two.view(torch.int16)).any())


CHECKS: dict[str, Callable[[int], None]] = {
    check.__name__: check
    for check in (
        sums_have_the_bits_of_the_reference,
        a_partial_of_any_shape_and_alignment_is_summed,
        many_calls_of_mixed_sizes_without_waiting,
        a_graph_replays_the_bits_with_new_values,
        a_group_that_first_meets_in_a_capture_is_refused,
        two_ranks_give_the_bits_of_one_forward_and_backward,
        one_segment_would_have_other_bits,
    )
}


def _rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl", meeting, rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank))
    for name, check in CHECKS.items():
        said = ""
        try:
            check(rank)
        except Exception:  # noqa: BLE001 (the parent reports it)
            said = traceback.format_exc()
        torch.cuda.synchronize()
        Path(folder, f"{name}.{rank}").write_text(json.dumps(said))
        dist.barrier()
    dist.destroy_process_group()


def run() -> dict[str, str]:
    """Check → what went wrong on either rank, empty where nothing did; ranks that hang are ended after SECONDS."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(_rank, (folder,), nprocs=RANKS, join=False, start_method="spawn")
        crash = ""
        try:
            if not context.join(timeout=SECONDS, grace_period=10):
                context.join(timeout=10)
        except Exception as error:  # noqa: BLE001 (a rank that ended early: its last words)
            crash = str(error)
        for process in context.processes:
            if process.is_alive():
                process.kill()
        found = {}
        for name in CHECKS:
            files = [Path(folder, f"{name}.{rank}") for rank in range(RANKS)]
            said = [json.loads(f.read_text()) if f.exists() else f"no result: {crash or 'it hangs'}" for f in files]
            found[name] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
        return found
