"""The Hopper kernels in Gluon, compiled without a GPU: they fit, and their matrix products run asynchronously.

The assembler serialises wgmma, and only says so, when registers run out or an accumulator is touched too early; the
bits stay the same and half the speed is gone. So what it says is the test.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from rl_kernel.ops.aot import CUDA_SM90, KERNELS

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
SHARED_MEMORY = 227 * 1024
SPILT = {"dkdv-128": 56, "dkdv-128-one": 56}  # bytes that a thread of the fastest found stores; more would be slower


def descriptor(*shape: int, of: str = "bf16") -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), {"bf16": gl.bfloat16, "fp32": gl.float32}[of])
    return f"tensordesc<{of}[{','.join(map(str, shape))}],{layout!r}>"


def attention(dim: int, page: int = 0) -> tuple[Any, dict[str, str], dict[str, Any]]:
    from rl_kernel.ops.attention import gluon_kernel as op

    types = dict.fromkeys(("m_out", "l_out"), "*fp32") | dict.fromkeys(
        ("redo", "queue", "table", "cu_q", "cu_k", "lens"), "*i32"
    )
    box = (min(page, 64), 64)
    types |= {"out": "*bf16", "q": descriptor(128, dim)}
    types |= (
        {"k": descriptor(*box), "v": descriptor(*box)}
        if page
        else {"k": descriptor(128, dim), "v": descriptor(64, dim)}
    )
    types |= dict.fromkeys(("sequences", "tiles", "table_width", "page_rows"), "i32") | {"scale": "fp32"}
    return op.attention_kernel, types, {
        "HEADS": 32, "KV_HEADS": 8, "D": dim, "WIDTH": 16, "STAGES": op.STAGES[dim], "PARTIAL": 1024, "PAGE": page,
    }  # fmt: skip


def gradients(dim: int, of_keys: bool, width: int = 16) -> tuple[Any, dict[str, str], dict[str, Any]]:
    from rl_kernel.ops.attention import gluon_backward as op

    queries, keys = (descriptor(rows, dim) for rows in ((op.BLOCK, op.TILE) if of_keys else (op.TILE, op.BLOCK)))
    types = {"dq": "*bf16", "dk": "*fp32", "dv": "*fp32", "terms": "*fp32", "cu": "*i32"}
    types |= {"q": queries, "dout": queries, "k": keys, "v": keys, "score_scale": "fp32", "scale": "fp32"}
    types |= dict.fromkeys(("sequences", "tokens"), "i32")
    kernel = op.dkdv_kernel if of_keys else op.dq_kernel
    constants = {"HEADS": 32, "KV_HEADS": 8, "D": dim, "WIDTH": width, "STAGES": op.STAGES[dim]}
    return kernel, {name: t for name, t in types.items() if name in kernel.arg_names}, constants


def product(
    segments: int, rows_of_b: bool, m: int = 8192, fp32: bool = False
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    from rl_kernel.ops import gluon_matmul as op

    shape, stored = op.shape_for(m), "fp32" if fp32 else "bf16"
    types = {"y": f"*{stored}", "m": "i32", "n": "i32", "steps": "i32"}
    types["y_tiles"] = descriptor(64, shape.bn, of=stored)
    types |= {"a": descriptor(shape.bm, op.BK)}
    types["b"] = descriptor(shape.bn, op.BK) if rows_of_b else descriptor(op.BK, shape.bn)
    return op.gemm_tree_kernel, types, {
        "SEGMENTS": segments, "BM": shape.bm, "BN": shape.bn, "BK": op.BK,
        "STAGES": shape.stages, "GROUP": op.GROUP, "ROWS_OF_B": rows_of_b, "FP32": fp32, "STAGED": True,
    }  # fmt: skip


def few(rows: int, segments: int = 1, rows_of_b: bool = True) -> tuple[Any, dict[str, str], dict[str, Any]]:
    from rl_kernel.ops import gluon_few as op

    types = {"y": "*bf16"} | dict.fromkeys(("m", "n", "steps"), "i32")
    types |= {"a": descriptor(rows, op.BK), "w": descriptor(*((op.BN, op.BK) if rows_of_b else (op.BK, op.BN)))}
    return op.gemm_few_kernel, types, {
        "SEGMENTS": segments, "BM": rows, "BN": op.BN, "BK": op.BK, "STAGES": op.STAGES[rows], "ROWS_OF_B": rows_of_b,
        "FP32": False,
    }  # fmt: skip


def head(tokens: int, merged: bool) -> tuple[Any, dict[str, str], dict[str, Any]]:
    from rl_kernel.ops.linear_logp import gluon_kernel as op

    types = dict.fromkeys(
        ("tokens", "width", "steps", "vocab_start", "vocab", "tiles", "token_stride", "tile_stride"), "i32"
    )
    types |= dict.fromkeys(("lse", "logp", "top_io", "sum_io", "m", "s", "z_target"), "*fp32")
    types |= {"flags": "*i32", "target": "*i64", "temperature": "fp32"}
    bm = op.rows_for(tokens)
    types |= {"h": descriptor(bm, op.BK), "w": descriptor(op.BN, op.BK)}
    return op.linear_stats_kernel, types, {
        "BM": bm, "BN": op.BN, "BK": op.BK, "STAGES": op.STAGES[bm], "GROUP": op.GROUP, "HEATED": False,
        "MERGE": merged, "CONTINUE": False, "FINISH": True, "BATCH": op.BATCH, "AHEAD": op.AHEAD,
    }  # fmt: skip


def decode(members: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    from rl_kernel.ops.attention import gluon_decode as op

    types = dict.fromkeys(("out", "q", "k", "v"), "*bf16") | {"scale": "fp32"}
    types |= dict.fromkeys(("m_out", "l_out", "acc_out", "exchange"), "*fp32")
    types |= dict.fromkeys(("flags", "table", "cu_q", "lens"), "*i32") | dict.fromkeys(("sequences", "tokens"), "i32")
    types |= dict.fromkeys(("table_width", "q_token", "k_page", "k_token", "v_page", "v_token"), "i32:16")
    return op.shared_decode_kernel, types, {
        "HEADS": 32, "KV_HEADS": 8, "D": 128, "ROWS": 8, "WIDTH": 16, "PARTIAL": 1024, "PAGE": 16,
        "SINGLE": members == 8, "MEMBERS": members, "ROUND": op.ROUND[members],
    }  # fmt: skip


CASES = {
    "attention-64": lambda: attention(64),
    "attention-128": lambda: attention(128),
    "attention-128-pages": lambda: attention(128, 16),
    "dq-64": lambda: gradients(64, False),
    "dq-128-one": lambda: gradients(128, False, 1),
    "dkdv-64": lambda: gradients(64, True),
    "dkdv-128": lambda: gradients(128, True),
    "dkdv-128-one": lambda: gradients(128, True, 1),
    "product-2": lambda: product(2, True),
    "product-8": lambda: product(8, True),
    "product-8-fp32": lambda: product(8, True, fp32=True),
    "product-8-dx": lambda: product(8, False),
    "product-8-few": lambda: product(8, True, 64),
    "few-8": lambda: few(8),
    "few-16": lambda: few(16),
    "few-8-tree": lambda: few(8, 8),
    "few-16-dx": lambda: few(16, 8, False),
    "head": lambda: head(256, False),
    "head-merged": lambda: head(256, True),
    "head-merged-few": lambda: head(64, True),
    "decode-8": lambda: decode(8),
    "decode-2": lambda: decode(2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_fits_and_no_wgmma_is_serialised(case: str, tmp_path: Path) -> None:
    kernel, types, constants = CASES[case]()
    names = kernel.arg_names
    even = {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t[0] == "*" or t.endswith(":16")}
    source = GluonASTSource(
        kernel,
        {name: types.get(name, "constexpr").removesuffix(":16") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        even,
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert ("mma.sync" if case.startswith("decode") else "wgmma.mma_async") in compiled.asm["ptx"]
    assert_it_waits(compiled.asm["ptx"], not case.startswith(("head", "product", "dq", "dkdv")))
    said = assembled(compiled.asm["ptx"], tmp_path)
    assert "serialized" not in said, said
    if case in ("attention-64", "attention-128"):
        assert "0 bytes stack frame" in said, said
    if case.startswith(("dq", "dkdv")):
        assert int(re.findall(r"(\d+) bytes spill stores", said)[0]) <= SPILT.get(case, 0), said


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page", [0, 16])
def test_what_looks_at_flags_uses_no_local_memory(dim: int, page: int, tmp_path: Path) -> None:
    """Else it costs the attention beside it ten microseconds."""
    from rl_kernel.ops.attention import gluon_again as op

    kernel = op.again_kernel
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(("m_out", "l_out"), "*fp32") | {"scale": "fp32"}
    types |= dict.fromkeys(("out", "q", "k", "v"), "*bf16")
    types |= dict.fromkeys(("table", "cu_q", "cu_k", "lens", "redo"), "*i32")
    constants = {
        "HEADS": 32, "KV_HEADS": 8, "D": dim, "COLUMNS": op.COLUMNS, "WIDTH": 16, "PARTIAL": 1024, "PAGE": page,
        "TMA": False, "EX2": True, "FLAGS": op.FLAGS,
    }  # fmt: skip
    types |= dict.fromkeys(constants, "constexpr")
    even = [n for n, t in types.items() if t[0] == "*" or n.endswith(("_token", "_page"))]
    place = kernel.arg_names.index
    source = ASTSource(
        kernel, types, {(place(n),): value for n, value in constants.items()},
        {(place(n),): [["tt.divisibility", 16]] for n in even},
    )  # fmt: skip
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False} | op.SHAPE)
    assert_it_waits(compiled.asm["ptx"], True)
    said = assembled(compiled.asm["ptx"], tmp_path)
    assert "0 bytes stack frame" in said, said


@pytest.mark.parametrize("function", ["decode_kernel", "merge_kernel"])
def test_decode_waits_for_what_is_before_it(function: str) -> None:
    kernel = next(k for k in KERNELS if k.function == function and k.module.endswith("triton_decode"))
    assert_it_waits(kernel.compile(CUDA_SM90).asm["ptx"], True)


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True])
def test_a_norm_spills_nothing_and_is_what_the_source_writes(long: bool, tmp_path: Path) -> None:
    from rl_kernel.ops.rms_norm import gluon_kernel as op
    from tests.rocm.isa import cuda_findings

    kernel = op.rms_norm_long_kernel if long else op.rms_norm_heads_kernel
    constants = {**op.shape_for(8192), "RESIDUAL": True, "EARLY": False} if long else {"ROWS": op.ROWS}
    types = dict.fromkeys(kernel.arg_names, "i32") | {"eps": "fp32"} | dict.fromkeys(constants, "constexpr")
    types |= {n: "*bf16" for n in ("y", "new_residual", "x", "residual", "w") if n in types}
    place = kernel.arg_names.index
    source = GluonASTSource(
        kernel, types, {(place(n),): value for n, value in constants.items()},
        {(place(n),): [["tt.divisibility", 16]] for n, t in types.items() if t[0] == "*" or n in ("stride", "n")},
    )  # fmt: skip
    options = {"num_warps": 4, "enable_fp_fusion": False, "launch_pdl": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert cuda_findings(compiled, matrix=False, exp2=False) == []
    assert "ld.global.v4" in compiled.asm["ptx"]
    said = assembled(compiled.asm["ptx"], tmp_path)
    assert "0 bytes stack frame" in said, said


def assert_it_waits(ptx: str, dependent: bool) -> None:
    """One that starts before its predecessor has ended waits for it ahead of all that it reads or writes."""
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    assert bool(wait) == dependent
    if dependent:
        assert not re.search(r"\b(ld|st|red|atom)\.[\w.:]*global|cp\.async", before), before


def assembled(ptx: str, folder: Path) -> str:
    """What the assembler says of it: registers, spills, wgmma that it had to serialise."""
    (folder / "kernel.ptx").write_text(ptx)
    command = [PTXAS, "-arch=sm_90a", "--fmad=false", "-v", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr
