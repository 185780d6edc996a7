"""The CUDA source, compiled without a GPU: nothing spills, and its matrix products run asynchronously.

As in `test_gluon_compiles`, what the assembler says is the test.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

from rl_kernel.errors import PlanError
from rl_kernel.ops import cluster_matmul, cuda_source

NVCC = shutil.which("nvcc")
CASES = {
    "256 rows": (256, 4096, True, False),
    "64 rows": (64, 4096, True, False),
    "64 rows, tiles of 96 that are shared": (64, 6144, True, False),
    "64 rows, alone": (64, 24576, True, False),
    "256 rows, alone": (256, 6144, True, False),
    "512 rows, alone": (512, 4096, True, False),
    "256 rows, dx, fp32": (256, 4096, False, True),
}


@pytest.mark.skipif(NVCC is None, reason="needs nvcc, which a machine without CUDA has not")
@pytest.mark.parametrize("case", CASES)
def test_it_compiles_and_no_wgmma_is_serialised(case: str, tmp_path: Path) -> None:
    rows, columns, rows_of_b, fp32 = CASES[case]
    shape = cluster_matmul.shape_for(rows, columns, 8, 132, rows_of_b)
    assert shape is not None
    constants = cluster_matmul.constants(shape, 8, rows_of_b, fp32)
    source, ptx = Path(cuda_source.__file__).with_name("cluster_matmul.cu"), tmp_path / "kernel.ptx"
    target = ["-gencode=arch=compute_90a,code=compute_90a", "--fmad=false", "-std=c++17", "-ptx"]
    defined = [f"-D{name}={value}" for name, value in constants]
    subprocess.run([str(NVCC), *target, *defined, source, "-o", ptx], check=True)
    text = ptx.read_text()
    before, wait, after = text.partition("griddepcontrol.wait")
    assert wait
    assert not re.search(r"\b(ld|st|red|atom)\.[\w.:]*global|cp\.async", before)
    assert "cp.async.bulk.tensor" in after
    assert not re.search(r"\bfma\.", text)
    command = [str(NVCC), "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "--fmad=false", "-Xptxas=-v", ptx]
    said = subprocess.run([*command, "-o", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True)
    assert "serialized" not in said.stderr, said.stderr
    assert "0 bytes stack frame, 0 bytes spill stores" in said.stderr, said.stderr


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "driver", None)
    with pytest.raises(PlanError, match="cuda-bindings is missing"):
        cuda_source.tensor_map(0, 1, 64, 64, 64)
