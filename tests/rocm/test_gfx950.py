"""Every kernel compiled for an MI350X, and what stands between its products and a contract. None of it was run."""

import pytest
from triton.backends.compiler import GPUTarget

from rl_kernel.contract import MMA_MODELS
from rl_kernel.ops.aot import KERNELS, Kernel
from tests.rocm.isa import GFX950, amd_findings, matrix_instructions

HIP_GFX950 = GPUTarget("hip", "gfx950", 64)
_PRODUCTS = [k for k in KERNELS if k.matrix]
# Their second product takes an operand out of the first one's registers, four neighbours of k a lane where the
# instruction takes eight: k is permuted inside an instruction, so groups of 8 would hold other products than on gfx942.
_PERMUTED = ("attention_kernel", "decode_kernel", "dq_kernel", "dkdv_kernel")


@pytest.mark.parametrize("kernel", _PRODUCTS, ids=lambda k: k.name)
def test_products_compile_to_instructions_that_have_no_mma_model(kernel: Kernel) -> None:
    compiled = kernel.compile(HIP_GFX950)
    found = matrix_instructions(compiled)
    assert found
    assert found <= {m.name for m in GFX950}
    findings = amd_findings(compiled, matrix=True, allowed=GFX950)
    permuted = [f for f in findings if "k is not summed in order" in f]
    assert [f for f in findings if f not in permuted] == []
    assert bool(permuted) == (kernel.function in _PERMUTED)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if not k.matrix], ids=lambda k: k.name)
def test_kernels_without_products_compile_to_what_their_source_writes(kernel: Kernel) -> None:
    assert amd_findings(kernel.compile(HIP_GFX950), matrix=False, allowed=GFX950) == []


def test_no_contract_claims_to_know_cdna4() -> None:
    assert not any("cdna4" in name or "gfx950" in name for name in MMA_MODELS)
