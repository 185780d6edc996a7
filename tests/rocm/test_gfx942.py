"""Every kernel compiled for an MI300X on a machine without a GPU, and its instructions read. None of it was run."""

import importlib
from dataclasses import replace

import pytest
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from rl_kernel.contracts import model_contract
from rl_kernel.errors import PlanError
from rl_kernel.ops import strict_plan, tables
from rl_kernel.ops.aot import HIP_GFX942, KERNELS, Kernel
from rl_kernel.plan import Plan
from tests.rocm import mutants
from tests.rocm.isa import GFX942, amd_findings, compile_with, k_orders, matrix_instructions


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_the_instructions_are_those_that_the_source_writes(kernel: Kernel) -> None:
    compiled = kernel.compile(HIP_GFX942)
    assert amd_findings(compiled, matrix=kernel.matrix, allowed=GFX942) == []


def test_the_table_has_matrix_products_and_exponentials() -> None:
    assert {k.module.split(".")[2] for k in KERNELS} >= {"attention", "linear_logp", "rms_norm", "rope", "swiglu"}
    assert sum(k.matrix for k in KERNELS) >= 10
    assert sum(k.exp2 for k in KERNELS) >= 8


def test_the_plan_refuses_rocm_because_nothing_was_run_there() -> None:
    contract = model_contract("cdna3")
    with pytest.raises(PlanError, match=r"embedding on rocm: backend triton was compiled for gfx942 .* never run"):
        strict_plan(contract, "rocm")
    with pytest.raises(PlanError, match=r"no backend serves gemm on rocm under MMA model sm90"):
        Plan.build(replace(contract, ops=(model_contract("sm90")["gemm"],)), "rocm", tables())
    for op in contract.ops:
        with pytest.raises(PlanError, match=rf"{op.op} on rocm: backend triton .* so nothing proves its bits"):
            Plan.build(replace(contract, ops=(op,)), "rocm", tables())


def test_every_kernel_of_a_rocm_row_is_compiled_here() -> None:
    """What the rows claim was compiled is in the list above: their modules' kernels and those that these launch."""
    compiled = {(k.module, k.function) for k in KERNELS}
    for table in tables().values():
        (row,) = (b for b in table if b.device == "rocm")
        launched = {
            (k.fn.__module__, k.__name__)
            for name in _modules(row.module)
            for k in vars(importlib.import_module(name)).values()
            if isinstance(k, JITFunction) and k.__name__.endswith("_kernel")
        }
        assert launched
        assert {k for k in launched if not _of_hopper(k[0])} <= compiled, row.op


def _of_hopper(module: str) -> bool:
    """Kernels that ROCm is kept from: `EX2` says no, and partials of ranks are gathered there."""
    return "gluon" in module or "symmetric" in module


def _modules(name: str) -> set[str]:
    """The module, and those of ops that it takes functions from."""
    origins = {getattr(v, "__module__", "") or "" for v in vars(importlib.import_module(name)).values() if callable(v)}
    return {name} | {origin for origin in origins if origin.startswith("rl_kernel.ops.")}


_FP32 = {"y": "*fp32", "a": "*fp32", "b": "*fp32"}
_PRODUCT = {"c": "*fp32", "a": "*bf16", "b": "*bf16"}


def _findings(kernel: CompiledKernel, *, matrix: bool = False) -> str:
    return "; ".join(amd_findings(kernel, matrix=matrix, allowed=GFX942))


def test_contraction_of_a_product_into_a_sum_is_found() -> None:
    written = compile_with(mutants.multiply_then_add, _FP32, {}, HIP_GFX942)
    assert _findings(written) == ""
    fused = compile_with(mutants.multiply_then_add, _FP32, {}, HIP_GFX942, enable_fp_fusion=True)
    assert "fused multiply-adds more than written" in _findings(fused)


def test_the_hardware_exponential_is_found() -> None:
    kernel = compile_with(mutants.approximate_exp2, {"y": "*fp32", "a": "*fp32"}, {}, HIP_GFX942)
    assert "v_exp_f32: an operation that no contract writes" in _findings(kernel)


def test_an_approximate_division_is_found_and_an_exact_one_is_not() -> None:
    fast = compile_with(mutants.fast_division, _FP32, {}, HIP_GFX942)
    assert "a reciprocal stands for a division" in _findings(fast)
    for exact in (mutants.exact_division_and_root, mutants.plain_division):  # what `/` means differs on CUDA
        assert _findings(compile_with(exact, _FP32, {}, HIP_GFX942)) == ""


def test_a_matrix_product_whose_k_is_permuted_over_lanes_is_found() -> None:
    constants = {"side": 64, "depth": 64}
    plain = compile_with(mutants.product, _PRODUCT, constants, HIP_GFX942)
    assert _findings(plain, matrix=True) == ""
    permuted = compile_with(mutants.product, _PRODUCT, constants, HIP_GFX942, kpack=2)
    assert {width for _, width in k_orders(permuted)} == {8}
    assert "k is not summed in order" in _findings(permuted, matrix=True)


def test_a_product_on_another_matrix_instruction_is_found() -> None:
    signature = {"c": "*fp32", "a": "*fp16", "b": "*fp16"}
    kernel = compile_with(mutants.product, signature, {"side": 64, "depth": 64}, HIP_GFX942)
    assert matrix_instructions(kernel) == {"v_mfma_f32_32x32x8_f16"}
    assert "v_mfma_f32_32x32x8_f16 has no MMA model here" in _findings(kernel, matrix=True)
    assert "where the source has none" in _findings(kernel)
