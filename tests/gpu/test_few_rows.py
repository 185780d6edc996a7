"""Few rows by a large weight: with a tree over segments, and along the weight's other side, the plain kernel's bits."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.gpu.mutated import mutated
from tests.gpu.tensors import normal, same_bits

pytestmark = pytest.mark.gpu

LARGE = 3e38  # times itself it is infinite
# What the kernel must not do, as changes of its text: each makes a comparison below fail.
MUTANTS = {
    "a level of the tree left out": ("                acc = s1 + acc\n", "                acc = acc\n"),
    "a sum that waits at another level": ("elif segment % 4 == 1:\n", "elif segment % 4 == 3:\n"),
    "a chain that goes on over the end of a segment": ("acc, use_acc=step > 0,", "acc, use_acc=step + segment > 0,"),
    "columns of the tile before": (
        "w, [step * BK, tile * BN], full", "w, [step * BK, max(tile - 1, 0) * BN], full",
    ),
}  # fmt: skip


def operands(rows: int, columns: int, total: int, rows_of_b: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """a[rows,total] and b[total,columns], values of all sizes among them, what is infinite, no number, zero."""
    a, w = normal(rows, total, seed=1), normal(*((columns, total) if rows_of_b else (total, columns)), seed=2)
    b = w.t() if rows_of_b else w
    a[::3] *= 1e3
    b[:, 5] = -b[:, 4]
    b[total // 3, 0], b[total - 1, 1], b[:, 2] = LARGE, float("-inf"), 0.0
    if rows > 3:
        a[0, total // 3], a[1, 1], a[2], a[3] = LARGE, float("nan"), 1e-38, -0.0
    return a, b


def compare(
    rows: int, columns: int, total: int, segments: int, rows_of_b: bool, dtype: torch.dtype = torch.bfloat16,
    op: ModuleType | None = None,
) -> None:  # fmt: skip
    from rl_kernel.ops import gluon_few
    from rl_kernel.ops.triton_matmul import product

    a, b = operands(rows, columns, total, rows_of_b)
    y = torch.full((rows, columns), float("nan"), dtype=dtype, device="cuda")
    assert gluon_few.serves(y, a, b, segments)
    (op or gluon_few).few_product(y, a, b, segments)
    same_bits(y, product(torch.empty_like(y), a, b, segments=segments), f"{rows} x {columns} x {total}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows_of_b", [True, False])
@pytest.mark.parametrize("segments", [1, 2, 4, 8])
@pytest.mark.parametrize(("columns", "total"), [(4096, 2048), (4104, 6144), (17000, 2048)])
def test_every_number_of_segments_has_the_bits_of_the_plain_kernel(
    columns: int, total: int, segments: int, rows_of_b: bool, dtype: torch.dtype
) -> None:
    for rows in (1, 7, 8, 9, 16):
        compare(rows, columns, total, segments, rows_of_b, dtype)


def test_gradients_of_few_rows_take_this_way_and_have_the_bits_of_many() -> None:
    from rl_kernel.ops import gluon_few
    from rl_kernel.ops.gemm.cublaslt import gemm_dx

    dy, w = normal(300, 6144, seed=3), normal(6144, 4096, seed=4, scale=0.05)
    assert gluon_few.serves(torch.empty_like(dy[:16]), dy[:16], w, 8)
    for segments in (1, 8):
        whole = gemm_dx(dy, w, segments=segments)
        for rows in (1, 8, 16, 17):
            same_bits(gemm_dx(dy[:rows], w, segments=segments), whole[:rows], f"{rows} rows")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, tmp_path: Path) -> None:
    from rl_kernel.ops import gluon_few

    changed = mutated(tmp_path, Path(str(gluon_few.__file__)), *MUTANTS[name])
    with pytest.raises(AssertionError, match="values differ"):
        compare(8, 4096, 2048, 8, False, op=changed)
