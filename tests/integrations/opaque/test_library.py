"""Strict ops as torch operators: lawful, opaque to a compiler, counted, and gone from the counts where replaced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_kernel.contracts import model_contract
from rl_kernel.errors import EvidenceError, PlanError
from rl_kernel.integrations.opaque.plan import OpaquePlan
from rl_kernel.ops import strict_plan

T, K, N, V = 5, 96, 64, 70
FUNCTIONS = ("embedding", "gemm", "rms_norm", "add_rms_norm", "rope", "rope_pair", "swiglu")
OWNER = {"add_rms_norm": "rms_norm", "rope_pair": "rope"}


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def plan(tally: Any = None) -> OpaquePlan:
    return OpaquePlan(strict_plan(model_contract(), "cpu"), engine="test", tally=tally)


def arguments(key: str) -> dict[str, tuple[Any, ...]]:
    """What each operator is called with; rows of the norm and of RoPE lie apart, as in a slice of a projection."""
    heads = bf16(T, 6, 16, seed=3)[:, :4]
    cos, sin = torch.rand(9, 8), torch.rand(9, 8)
    return {
        "embedding": (torch.arange(T), bf16(V, K), key),
        "gemm": (bf16(T, K), bf16(N, K, seed=1), 2, True, key),
        "rms_norm": (heads, bf16(16), 1e-5, key),
        "add_rms_norm": (bf16(T, K), bf16(T, K, seed=1), bf16(K, seed=2), 1e-6, True, key),
        "rope": (heads, cos, sin, torch.arange(T), False, key),
        "rope_pair": (heads, heads[:, :2], cos, sin, torch.arange(T), False, key),
        "swiglu": (bf16(T, 2 * N), key),
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operator_keeps_torchs_laws_and_its_shapes_are_true(name):
    served = plan()
    served.function(OWNER.get(name, name), name)
    torch.library.opcheck(getattr(torch.ops.rl_kernel, name).default, arguments(served.key)[name])


class Layer(torch.nn.Module):
    """Every operator of a decoder layer, called as vLLM's layers do."""

    def __init__(self, served: OpaquePlan) -> None:
        super().__init__()
        self.ops = {n: served.function(OWNER.get(n, n), n) for n in FUNCTIONS}
        self.table, self.up, self.gain = bf16(V, K), bf16(2 * N, K, seed=1), bf16(K, seed=2)
        self.cos, self.sin = torch.rand(9, 4), torch.rand(9, 4)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.ops["embedding"](ids, self.table)
        y, x = self.ops["add_rms_norm"](self.ops["rms_norm"](x, self.gain, 1e-5), x, self.gain, 1e-5, seal=True)
        heads, angles = y.view(-1, 12, 8), (self.cos, self.sin, positions)
        q, k = self.ops["rope_pair"](heads[:, :8], heads[:, 8:], *angles, seal=True)
        heads = self.ops["rope"](torch.cat((q, k), 1), *angles).view(y.shape)
        return self.ops["swiglu"](self.ops["gemm"](heads, self.up, segments=3)) + x[:, :N]


CALLS = {"embedding": 1, "gemm": 1, "rms_norm": 1, "add_rms_norm": 1, "rope": 1, "rope_pair": 1, "swiglu": 1}


def calls(served: OpaquePlan) -> dict[str, int]:
    return {name.partition(".")[2]: n for name, n in served.evidence().calls().items()}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_calls_the_operators_as_often_and_gives_the_same_bits(backend):
    served = plan()
    layer = Layer(served)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for rows in (2, 5):
        ids, positions = torch.arange(rows), torch.arange(rows)
        served.reset()
        found = compiled(ids, positions)
        assert calls(served) == CALLS
        assert torch.equal(found.view(torch.int16), layer(ids, positions).view(torch.int16))


def test_the_compilers_graph_holds_operators_and_nothing_of_their_insides():
    served, seen = plan(), []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(Layer(served), fullgraph=True, backend=keep)(torch.arange(3), torch.arange(3))
    assert [name for name in seen if name.startswith("rl_kernel")] == [
        f"rl_kernel.{name}" for name in ("embedding", "rms_norm", "add_rms_norm", "rope_pair", "rope", "gemm", "swiglu")
    ]


def test_a_compiler_that_replaces_an_operator_leaves_a_hole_in_the_counts():
    served = plan()

    def replacing(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if "swiglu" in str(node.target):
                node.target, node.args = (lambda x: torch.nn.functional.silu(x[:, :N]) * x[:, N:]), node.args[:1]
        graph.recompile()
        return graph

    torch.compile(Layer(served), fullgraph=True, backend=replacing)(torch.arange(3), torch.arange(3))
    with pytest.raises(EvidenceError, match=r"swiglu\.swiglu was called 0 times, the model implies 1"):
        served.evidence().require({f"{OWNER.get(n, n)}.{n}": times for n, times in CALLS.items()})


def test_compiled_code_of_another_contract_finds_no_plan():
    with pytest.raises(PlanError, match="asks for plan 'vllm/cuda/0123', and this process has none of that name"):
        torch.ops.rl_kernel.swiglu(bf16(T, 2 * N), "vllm/cuda/0123")


def test_an_operator_that_no_layer_was_built_with_is_refused():
    with pytest.raises(PlanError, match="no layer of this engine was built with swiglu"):
        torch.ops.rl_kernel.swiglu(bf16(T, 2 * N), plan().key)


class Recording:
    """A tally that records on demand, as a CUDA stream does, and plays its recording when told to."""

    def __init__(self) -> None:
        self.on, self.noted, self.sealed, self.played = False, [0] * 12, [0] * 12, [0] * 12

    def recording(self) -> bool:
        return self.on

    def note(self, cell: int) -> None:
        self.noted[cell] += 1

    def seal(self) -> None:
        self.sealed = [a + b for a, b in zip(self.sealed, self.noted, strict=True)]
        self.noted = [0] * 12

    def play(self) -> None:
        self.played = [a + b for a, b in zip(self.played, self.sealed, strict=True)]

    def read(self) -> list[int]:
        if any(self.noted):
            raise EvidenceError("not sealed")
        return self.played

    def reset(self) -> None:
        self.played = [0] * 12


def test_a_recorded_call_counts_once_for_each_replay_and_not_when_it_is_recorded():
    tally = Recording()
    served = plan(tally)
    layer, rows = Layer(served), torch.arange(3)
    layer(rows, rows)
    tally.on = True
    layer(rows, rows)
    tally.on = False
    with pytest.raises(EvidenceError, match="not sealed"):  # gemm and swiglu come after the layer's last seal
        served.evidence()
    tally.seal()
    assert calls(served) == CALLS
    for _ in range(4):
        tally.play()
    assert calls(served) == {name: 5 * n for name, n in CALLS.items()}
    served.reset()
    assert calls(served) == {}
