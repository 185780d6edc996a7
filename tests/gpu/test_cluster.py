"""Programs that share a tile have the bits of the plain kernel, which the laws hold against the reference."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.gpu.tensors import normal, same_bits

pytestmark = pytest.mark.gpu

LARGE = 3e38  # times itself it is infinite
# What a source must not do, as changes of its text: each makes the comparisons below fail.
ARRIVED, LAST = "  await(&s.arrived[half][LEVEL], 0);\n", "kept[4 * i + 3] += v.w;\n  }\n"
MUTANTS: dict[str, list[tuple[str, str]]] = {
    "a sum read before it has arrived": [(ARRIVED, ""), (LAST, LAST + ARRIVED)],
    "a tree in another order": [
        (
            "  if (SEGMENTS == 4) add(x[2], x[1]), add(x[0], x[2]);",
            "  if (SEGMENTS == 4) add(x[0], x[2]), add(x[0], x[1]);",
        )
    ],
    "eight segments in another order": [
        ("add(x[2], x[1]), add(x[SUMS - 1], x[2])", "add(x[SUMS - 1], x[2]), add(x[SUMS - 1], x[1])")
    ],
    "half of eight segments that nobody fetches": [(", add_parked(room, x[0]);", ";")],
    "a tile in the place of another": [("column = tile % band / height * BN", "column = tile % band / height * 64")],
    "columns that trade places": [("kept[i] = upper ?", "kept[i] = !upper ?")],
    "whose shared memory it is, in a place": [("place(s.b[0]) & 0x3FFFF", "place(s.b[0])")],
    "memory read before the launch before has ended": [('  asm volatile("griddepcontrol.wait;" ::: "memory");\n', "")],
}


def operands(m: int, n: int, k: int, rows_of_b: bool, biting: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """a[m,k] and b[k,n] of the two layouts; biting: with what is infinite, no number, tiny or cancels."""
    a, w = normal(m, k, seed=1), normal(*((n, k) if rows_of_b else (k, n)), seed=2, scale=0.05)
    b = w.t() if rows_of_b else w
    a[::3] *= 1e3
    a[1::5] *= 1e-3
    if biting:
        a[0, k // 3], a[1, 1], a[2], a[3] = LARGE, float("nan"), 1e-38, -0.0
        b[k // 3, 0], b[k - 1, 1], b[:, 2] = LARGE, float("-inf"), 0.0
        a[4] = a[5]
        a[4, : k // 2] = -a[4, k // 2 :]
    return a, b


def compare(
    m: int, n: int, k: int, segments: int, rows_of_b: bool, dtype: torch.dtype, biting: bool = False,
    tile: tuple[int, int, int] | None = None,
) -> None:  # fmt: skip
    from rl_kernel.ops.cluster_matmul import Shape, cluster_product, serves
    from rl_kernel.ops.triton_matmul import product

    a, b = operands(m, n, k, rows_of_b, biting)
    y = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
    assert tile or serves(y, a, b, segments)
    cluster_product(y, a, b, segments, Shape(*tile) if tile else None)
    same_bits(y, product(torch.empty_like(y), a, b, segments=segments), f"{m} x {n} x {k}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows_of_b", [True, False])
@pytest.mark.parametrize("segments", [2, 4, 8])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(17, 64, 512), (64, 4096, 1024), (65, 1000, 2048), (130, 136, 8192), (200, 1032, 1024), (256, 4096, 4096)],
)
def test_every_shape_has_the_bits_of_the_plain_kernel(
    m: int, n: int, k: int, segments: int, rows_of_b: bool, dtype: torch.dtype
) -> None:
    for biting in (False, True):
        compare(m, n, k, segments, rows_of_b, dtype, biting)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("segments", [2, 4, 8])
@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (64, 6144, 1024, (64, 96, 2)),
        (40, 24584, 512, (64, 96, 1)),
        (60, 16384, 1024, (64, 64, 1)),
        (128, 24576, 512, (128, 96, 1)),
        (200, 6152, 4096, (128, 96, 1)),
        (256, 24576, 1024, (128, 96, 1)),
        (300, 5000, 1024, (128, 128, 1)),
        (2048, 4096, 2048, (128, 128, 1)),
    ],
)
def test_a_tile_of_one_program_and_one_of_96_columns_have_the_bits_of_the_plain_kernel(
    m: int, n: int, k: int, tile: tuple[int, int, int], segments: int, dtype: torch.dtype
) -> None:
    from rl_kernel.ops.accelerator import multiprocessors
    from rl_kernel.ops.cluster_matmul import Shape, shape_for

    if segments == 8 and multiprocessors(0) == 132:
        assert shape_for(m, n, segments, 132, True) == Shape(*tile)
    for biting in (False, True):
        compare(m, n, k, segments, True, dtype, biting, tile)


def chain(between: bool) -> torch.Tensor:
    """Eight products, each of what the one before wrote; between: one after another, otherwise as a graph has them."""
    from rl_kernel.ops.cluster_matmul import cluster_product

    x, w = normal(256, 4096, seed=3), normal(4096, 4096, seed=4, scale=0.016)
    held = [x, *[torch.full_like(x, float("nan")) for _ in range(8)]]
    torch.cuda.synchronize()
    if between:
        for before, after in pairwise(held):
            cluster_product(after, before, w.t(), 8)
            torch.cuda.synchronize()
        return held[-1]
    cluster_product(torch.empty_like(x), x, w.t(), 8)  # compiled before anything is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for before, after in pairwise(held):
            cluster_product(after, before, w.t(), 8)
    graph.replay()
    torch.cuda.synchronize()
    return held[-1]


def test_a_product_sees_what_the_launch_before_wrote() -> None:
    expected = chain(True)
    for _ in range(5):
        same_bits(chain(False), expected, "in a graph")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_kernel_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernel.ops import cluster_matmul, cuda_source

    text = Path(cuda_source.__file__).with_name("cluster_matmul.cu").read_text()
    for old, new in MUTANTS[name]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    source, expected = tmp_path / "mutant.cu", chain(True)
    source.write_text(text)
    changed = cuda_source.CudaKernel(str(source), "gemm_cluster_kernel")
    monkeypatch.setattr(cluster_matmul, "gemm_cluster_kernel", changed)

    def several_times() -> None:
        for _ in range(10):
            same_bits(chain(False), expected, name)
            compare(256, 4096, 4096, 8, False, torch.bfloat16)
            compare(256, 6144, 1024, 8, True, torch.bfloat16)
            compare(512, 4096, 1024, 8, True, torch.bfloat16)

    with pytest.raises(AssertionError, match="values differ"):
        several_times()
