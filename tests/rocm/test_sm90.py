"""The same kernels as PTX for an H200: one source, and here too nothing that the source did not write."""

import pytest
from triton.runtime.jit import JITFunction

from rl_kernel.ops.aot import CUDA_KERNELS, CUDA_SM90, KERNELS, Kernel
from tests.rocm import mutants
from tests.rocm.isa import compile_with, cuda_findings


@pytest.mark.parametrize("kernel", [*KERNELS, *CUDA_KERNELS], ids=lambda k: k.name)
def test_the_ptx_is_what_the_source_writes(kernel: Kernel) -> None:
    assert cuda_findings(kernel.compile(CUDA_SM90), matrix=kernel.matrix, exp2=kernel.exp2) == []


_FP32 = {"y": "*fp32", "a": "*fp32", "b": "*fp32"}


def test_what_ptxas_may_contract_is_found() -> None:
    assert cuda_findings(compile_with(mutants.multiply_then_add, _FP32, {}, CUDA_SM90), matrix=False, exp2=False) == []
    fused = compile_with(mutants.multiply_then_add, _FP32, {}, CUDA_SM90, enable_fp_fusion=True)
    assert cuda_findings(fused, matrix=False, exp2=False) != []


def test_approximate_instructions_are_found() -> None:
    exp2 = compile_with(mutants.approximate_exp2, {"y": "*fp32", "a": "*fp32"}, {}, CUDA_SM90)
    assert "ex2.approx.ftz.f32" in "; ".join(cuda_findings(exp2, matrix=False, exp2=False))
    division = compile_with(mutants.plain_division, _FP32, {}, CUDA_SM90)
    assert "div.full.f32" in "; ".join(cuda_findings(division, matrix=False, exp2=False))
    exact = compile_with(mutants.exact_division_and_root, _FP32, {}, CUDA_SM90)
    assert cuda_findings(exact, matrix=False, exp2=False) == []


def test_a_product_in_tf32_is_found() -> None:
    signature = {"c": "*fp32", "a": "*fp32", "b": "*fp32"}
    kernel = compile_with(mutants.product, signature, {"side": 64, "depth": 64}, CUDA_SM90)
    assert "does not sum 16 at a time" in "; ".join(cuda_findings(kernel, matrix=True, exp2=False))


def test_memory_touched_before_the_kernel_before_is_done_is_found() -> None:
    def found(function: JITFunction[object]) -> str:
        kernel = compile_with(function, {"y": "*fp32", "a": "*fp32"}, {}, CUDA_SM90, launch_pdl=True)
        return "; ".join(cuda_findings(kernel, matrix=False, exp2=False))

    assert found(mutants.wait_then_load) == ""
    assert "ld.global" in found(mutants.load_then_wait)
    assert "never waits" in found(mutants.never_wait)
