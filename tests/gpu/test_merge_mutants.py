"""Mutants of kernels that meet inside of a launch, or start before another has ended: on the hardware each is found."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.gpu.tensors import normal, same_bits

pytestmark = pytest.mark.gpu

Change = tuple[str, str, str]  # module, text, other text
MERGE, PRODUCT, SWIGLU = "linear_logp.gluon_merge", "linear_logp.gluon_kernel", "swiglu.triton_kernel"
RAISES = """        if MERGE:
            turn = tile // gl.num_programs(0)
            slot = HALF * TURNS + turn % TURNS
            mbarrier.wait(free.index(slot), ((turn // TURNS) & 1) ^ 1)
            gl.thread_barrier()
            mbarrier.arrive(done.index(slot))
"""
STORES = """        _statistics(
            m, s, z_target"""
LOOP = """        for step in range(steps):
            async_copy.wait_group"""
MERGES: dict[str, list[Change]] = {
    "a flag raised before its statistics are stored": [(PRODUCT, RAISES, ""), (PRODUCT, STORES, RAISES + STORES)],
    "tiles merged without waiting for their flags": [
        (MERGE, "while known < gl.minimum((step + 1) *", "while known < gl.minimum((step - (1 << 20)) *")
    ],
    "ids past the last that counts": [(PRODUCT, "if column + width > limit:", "if column > limit:")],
    "the wanted logit of few": [(PRODUCT, "(here < width), 1, 0), 0) > 0:", "(here < width), 1, 0), 0) < 0:")],
    "the last batch of tiles left out": [(MERGE, LOOP, LOOP.replace("steps", "steps - 1"))],
}
FIRST = """computes BLOCK features of one token.\"\"\"
    begin(HOPPER)
"""
AWAITS: dict[str, list[Change]] = {
    "no mutant": [],
    "nothing is awaited": [(SWIGLU, FIRST, FIRST.replace("    begin(HOPPER)\n", ""))],
}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Mutants leave counters as no launch may find them."""
    from rl_kernel.ops import gluon_join

    yield
    gluon_join._arenas.clear()
    for name in [name for name in sys.modules if name.startswith("mutant_")]:
        del sys.modules[name]


def changed(folder: Path, module: str, changes: list[Change]) -> ModuleType:
    """`module` of `rl_kernel.ops` with text for text replaced; of the head, with its merge."""
    import rl_kernel.ops

    root, found = Path(str(rl_kernel.ops.__file__)).parent, None
    for name in [MERGE, PRODUCT] if module == PRODUCT else [module]:
        text, own = (root / (name.replace(".", "/") + ".py")).read_text(), f"mutant_{name.replace('.', '_')}"
        for _, old, new in [change for change in changes if change[0] == name]:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        path = folder / f"{own}.py"
        path.write_text(
            text.replace(f"from rl_kernel.ops.{MERGE} import", f"from mutant_{MERGE.replace('.', '_')} import")
        )
        spec = importlib.util.spec_from_file_location(own, path)
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules[own] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    assert found is not None
    return found


def merged(module: ModuleType) -> torch.Tensor:
    """logp[200] of a head of 40,000 ids by `module`; the memory that its statistics get holds other numbers."""
    h, w = normal(200, 1024, seed=1), normal(40000, 1024, seed=2, scale=0.05)
    target = torch.arange(200, device="cuda") * 37
    lse, logp, top, total, z = torch.empty((5, 200), dtype=torch.float32, device="cuda")
    stale = torch.full((2, 8, 632, 32), 50.0, device="cuda")
    del stale
    where = module.Merge(lse, logp, (top, total))
    module.linear_merged(where, z, h, h.stride(0), w, target, 1.0, 0, 40000)
    torch.cuda.synchronize()
    return logp


@pytest.mark.parametrize("name", MERGES)
def test_a_mutant_of_the_heads_merge_is_found(name: str, tmp_path: Path) -> None:
    from rl_kernel.ops.linear_logp import gluon_kernel

    expected = merged(gluon_kernel)
    same_bits(merged(gluon_kernel), expected, "the kernel itself")
    mutant = changed(tmp_path, PRODUCT, MERGES[name])
    with pytest.raises(AssertionError, match="values differ"):
        same_bits(torch.cat([merged(mutant) for _ in range(3)]), expected.repeat(3), name)


@pytest.mark.parametrize("name", AWAITS)
def test_a_mutant_that_does_not_await_the_launch_before_is_found(name: str, tmp_path: Path) -> None:
    from rl_kernel.ops.gemm.cublaslt import gemm

    swiglu: Callable[[torch.Tensor], torch.Tensor] = changed(tmp_path, SWIGLU, AWAITS[name]).swiglu
    x, w = normal(8, 4096, seed=6), normal(24576, 4096, seed=7, scale=0.02)

    def run(between: Callable[[], None]) -> torch.Tensor:
        results = []
        for _ in range(20):
            gate_up = gemm(x, w)
            between()
            results.append(swiglu(gate_up))
            gate_up.fill_(0.5)  # what the next product's memory holds until it is written
        return torch.stack(results)

    expected, graph = run(torch.cuda.synchronize), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(lambda: None)
    graph.replay()
    torch.cuda.synchronize()
    if name == "no mutant":
        same_bits(found, expected, name)
        return
    with pytest.raises(AssertionError, match="values differ"):
        same_bits(found, expected, name)
