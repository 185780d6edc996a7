"""What a compiled Triton kernel would execute, read from its assembly: everything that could change a bit.

`amd_findings` and `cuda_findings` return one sentence for each thing that the source did not write, so that a test can
ask for none, and a mutant can show that there would be one.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triton.compiler import CompiledKernel

_RELAXED = re.compile(
    r"= (?:tail )?(?:fadd|fsub|fmul|fdiv|fneg|call)(?: (?:nnan|ninf|nsz|arcp|contract|afn|reassoc|fast))+ "
)
_APPROXIMATE_AMD = re.compile(r"v_(exp|log|sin|cos|sqrt|mad|mac|dot2|dot4)\w*_(legacy_)?(f32|f16|bf16)")
_PACKED_HALF_AMD = re.compile(r"v_pk_(add|mul|fma|min|max)_(f16|bf16)")
_MODE = {"float_round_mode_32": "0", "float_denorm_mode_32": "3"}


@dataclass(frozen=True)
class Mfma:
    """A matrix instruction of AMD: rows, summed products k, and how many neighbours of k one lane must hold."""

    name: str
    rows: int
    k: int

    @property
    def k_of_a_lane(self) -> int:
        """64 lanes hold rows · k operands; where a lane holds just these, k ascends with the lanes."""
        return self.rows * self.k // 64


# Each adds k/8 groups of 8, ascending: what MMA model cdna3 says of them.
GFX942 = (Mfma("v_mfma_f32_32x32x8_bf16", 32, 8), Mfma("v_mfma_f32_16x16x16_bf16", 16, 16))
# No MMA model is known for these.
GFX950 = (Mfma("v_mfma_f32_32x32x16_bf16", 32, 16), Mfma("v_mfma_f32_16x16x32_bf16", 16, 32))


def mnemonics(assembly: str) -> Counter[str]:
    """How often each instruction of AMD assembly occurs, encodings (`_e32`, `_e64`) left out."""
    names = re.findall(r"^\t([a-z]\w+)", assembly, re.MULTILINE)
    return Counter(re.sub(r"_(e32|e64|dpp|sdwa)$", "", name) for name in names)


def matrix_instructions(kernel: CompiledKernel) -> set[str]:
    """Names of the matrix instructions, AMD or NVIDIA."""
    if "amdgcn" in kernel.asm:
        return {name for name in mnemonics(kernel.asm["amdgcn"]) if "mfma" in name}
    return set(re.findall(r"(w?g?mma(?:_async)?\.[\w.]*m\d+n\d+k\d+[\w.]*)", kernel.asm["ptx"]))


def k_orders(kernel: CompiledKernel) -> set[tuple[str, int]]:
    """Of each matrix operand: the layout of its product and how many neighbours of k a lane holds (kWidth)."""
    text = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.(?:amd_mfma|nvidia_mma)<\{.*?\}>)", text, re.MULTILINE))
    operands = re.findall(r"dot_op<\{opIdx = \d, parent = (#\w+), kWidth = (\d+)\}>", text)
    return {(layouts[parent], int(width)) for parent, width in operands}


def amd_findings(kernel: CompiledKernel, *, matrix: bool, allowed: tuple[Mfma, ...]) -> list[str]:
    """Everything in a kernel for AMD that its source did not write. `allowed`: matrix instructions with a model."""
    return [
        *_mfma_findings(kernel, matrix, allowed),
        *_relaxed(kernel),
        *_amd_scalar_findings(kernel),
        *_amd_mode_findings(kernel),
    ]


def _mfma_findings(kernel: CompiledKernel, matrix: bool, allowed: tuple[Mfma, ...]) -> Iterator[str]:
    found = matrix_instructions(kernel)
    if matrix and not found:
        yield "a matrix product without a matrix instruction"
    if not matrix and found:
        yield f"matrix instructions where the source has none: {', '.join(sorted(found))}"
    for name in sorted(found - {m.name for m in allowed}):
        yield f"{name} has no MMA model here"
    shapes = {(m.rows, m.k): m for m in (*GFX942, *GFX950)}
    for layout, width in sorted(k_orders(kernel)):
        rows, _, k = map(int, re.search(r"instrShape = \[(\d+), (\d+), (\d+)\]", layout).groups())  # type: ignore[union-attr]
        mfma = shapes.get((rows, k))
        if mfma is None:
            yield f"unknown matrix instruction shape {layout}"
        elif width != mfma.k_of_a_lane:
            yield f"k is not summed in order: a lane holds {width} neighbours, {mfma.name} takes {mfma.k_of_a_lane}"


def _relaxed(kernel: CompiledKernel) -> Iterator[str]:
    for line in kernel.asm["llir"].splitlines():
        if _RELAXED.search(line):
            yield f"an operation that LLVM may contract or reassociate: {line.strip()[:90]}"
            return


def fused_in_llvm(text: str) -> int:
    """Fused multiply-adds that are written in LLVM IR, by scalar."""
    scalar = len(re.findall(r"call float @llvm\.fma\.f32\(|call float @llvm\.nvvm\.fma\.rn\.f\(", text))
    return scalar + sum(map(int, re.findall(r"call <(\d+) x float> @llvm\.fma\.v\d+f32\(", text)))


def _amd_scalar_findings(kernel: CompiledKernel) -> Iterator[str]:
    found = mnemonics(kernel.asm["amdgcn"])
    for name in sorted(found):
        if _APPROXIMATE_AMD.match(name) or _PACKED_HALF_AMD.match(name):
            yield f"{name}: an operation that no contract writes"
    # A correctly rounded division is v_div_scale (2), v_rcp, 5 fma, v_div_fmas, v_div_fixup.
    divisions = found["v_div_fixup_f32"]
    if found["v_rcp_f32"] != divisions:
        yield f"{found['v_rcp_f32']} v_rcp_f32 in {divisions} divisions: a reciprocal stands for a division"
    roots = kernel.asm["ttgir"].count("tt.precise_sqrt")
    if (found["v_rsq_f32"] > 0) != (roots > 0):
        yield f"{found['v_rsq_f32']} v_rsq_f32 for {roots} square roots"
    fused = (
        sum(n for name, n in found.items() if re.fullmatch(r"v_fma(c|ak|mk)?_f32", name)) + 2 * found["v_pk_fma_f32"]
    )
    # Integers divide through v_rcp_iflag_f32, which brings up to two fma of its own.
    extra = fused - fused_in_llvm(kernel.asm["llir"]) - 5 * divisions
    if not 0 <= extra <= 2 * found["v_rcp_iflag_f32"]:
        yield f"{extra} fused multiply-adds more than written: products were contracted into sums"


def _amd_mode_findings(kernel: CompiledKernel) -> Iterator[str]:
    text = kernel.asm["amdgcn"]
    for name, wanted in _MODE.items():
        if re.findall(rf"\.amdhsa_{name} (\d+)", text) != [wanted]:
            yield f"{name} is not {wanted}: rounding or subnormals differ from IEEE 754"
    if not re.search(r"\.wavefront_size: 64", text):
        yield "not compiled for wavefronts of 64 lanes"


_PTX_WRITTEN = re.compile(
    r"(add|sub|mul|fma|div|sqrt)\.rn\.f32|(max|min|neg|abs)\.f32|cvt\.(rn\.f32\.s\d+|f32\.bf16|rzi\.s32\.f32|rn\.bf16\S*)"
    r"|(add|mul|fma)\.rn\.bf16x2|(mov|ld|st|selp|setp|atom|red|shfl|and|or|xor|not|mma|wgmma)[\w.:]*"
)


_TOUCHES = re.compile(r"\b(?:(?:ld|st|atom|red)\b[.\w:]*\.global|cp\.async\.(?!wait|commit))[.\w:]*")


def _touched_early(kernel: CompiledKernel) -> Iterator[str]:
    """A launch that overlaps with the kernel before it may not load or store before it has waited."""
    if kernel.metadata.launch_pdl or "griddepcontrol" in kernel.asm["ptx"]:
        before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
        if not wait:
            yield "launched beside the kernel before, and never waits for it"
        for name in sorted(set(_TOUCHES.findall(before))):
            yield f"{name}: touches memory before it waits for the kernel before"


def cuda_findings(kernel: CompiledKernel, *, matrix: bool, exp2: bool) -> list[str]:
    """Everything in a kernel for sm_90 that its source did not write. exp2: it computes exponentials."""
    text = kernel.asm["ptx"]
    found = Counter(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]*)[ ;]", text, re.MULTILINE))
    findings = [*_relaxed(kernel), *_touched_early(kernel)]
    instructions = matrix_instructions(kernel)
    if bool(instructions) != matrix:
        findings.append(f"matrix instructions {sorted(instructions)} in a kernel whose source has {matrix=}")
    findings += [f"{name} does not sum 16 at a time" for name in sorted(instructions) if not re.search(r"k16\b", name)]
    findings += [
        f"a lane holds {width} neighbours of k in {layout}" for layout, width in sorted(k_orders(kernel)) if width != 2
    ]
    for name in sorted(found):
        if "f32" in name or "f16" in name:
            allowed = exp2 if name in ("ex2.approx.ftz.f32", "rcp.approx.ftz.f32") else _PTX_WRITTEN.fullmatch(name)
            if not allowed:
                findings.append(f"{name}: an operation that no contract writes, or one that ptxas may contract")
    extra = found["fma.rn.f32"] - fused_in_llvm(kernel.asm["llir"])
    if extra:
        findings.append(f"{extra} fused multiply-adds more than written")
    return findings


def compile_with(
    function: Any, signature: dict[str, str], constants: dict[str, Any], target: Any, **options: Any
) -> CompiledKernel:
    """Compile any Triton function, with options of choice: how the mutants are made."""
    from triton.compiler import ASTSource, compile

    source = ASTSource(function, signature | dict.fromkeys(constants, "constexpr"), constants)
    return compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": False} | options)
