"""Every GPU kernel and the launches that stand for it, as data: what is compiled ahead of time, without a GPU.

Tests compile each entry for `cuda:90` and `hip:gfx942` and read the instructions. Importing this module needs Triton
but no device.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile

from rl_kernel.ops.attention.triton_backward import launch_for as backward_launch

CUDA_SM90 = GPUTarget("cuda", 90, 32)
HIP_GFX942 = GPUTarget("hip", "gfx942", 64)

_ATTENTION = "rl_kernel.ops.attention.triton_prefill"
_DECODE = "rl_kernel.ops.attention.triton_decode"
_BACKWARD = "rl_kernel.ops.attention.triton_backward"
_LOGP = "rl_kernel.ops.linear_logp.triton_kernel"
_NORM = "rl_kernel.ops.rms_norm.triton_kernel"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel with one choice of constants.

    types: the Triton type of each run-time argument, in order; a trailing `:16` says "divisible by 16".
    constants: compile-time arguments. matrix: it multiplies matrices, so its ISA must hold the right instruction.
    exp2: it computes an exponential, whose model (`EX2`) depends on the target.
    """

    module: str
    function: str
    types: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int = 2
    matrix: bool = False
    exp2: bool = False

    @property
    def name(self) -> str:
        """The op, the function and the constants, readable in a test id."""
        op = self.module.split(".")[2]
        return f"{op}-{self.function}-" + "-".join(f"{key}{value}" for key, value in self.constants)

    def compile(self, target: GPUTarget) -> CompiledKernel:
        """Compile for `target`; the result's `asm` holds ptx and cubin, or amdgcn and hsaco."""
        function = getattr(importlib.import_module(self.module), self.function)
        constants = dict(self.constants)
        if self.exp2:
            constants["EX2"] = target.backend == "cuda"
        if "HOPPER" in function.arg_names:
            constants["HOPPER"] = target.backend == "cuda"
        names = [name for name in function.arg_names if name not in constants]
        if len(names) != len(self.types):
            raise TypeError(f"{self.name}: {len(self.types)} types for the arguments {', '.join(names)}")
        signature = dict(zip(names, (t.partition(":")[0] for t in self.types), strict=True))
        attributes = {
            (function.arg_names.index(name),): [["tt.divisibility", 16]]
            for name, t in zip(names, self.types, strict=True)
            if t.startswith("*") or t.endswith(":16")
        }
        source = ASTSource(
            function,
            {name: signature.get(name, "constexpr") for name in function.arg_names},
            {(function.arg_names.index(key),): value for key, value in constants.items()},
            attributes,
        )
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        if constants.get("HOPPER"):
            options["launch_pdl"] = True
        return compile(source, target=target, options=options)


def _kernel(module: str, function: str, types: str, warps: int, stages: int = 2, **constants: Any) -> Kernel:
    matrix = constants.pop("matrix", False)
    exp2 = constants.pop("exp2", False)
    return Kernel(module, function, tuple(types.split()), tuple(constants.items()), warps, stages, matrix, exp2)


def _products() -> Iterator[Kernel]:
    module = "rl_kernel.ops.triton_matmul"
    types = "*bf16 *bf16 *bf16 i32 i32:16 i32:16 i32:16 {} {} i32:16 i32"
    shapes = {16: (16, 32, 256, 4, 4), 64: (64, 64, 128, 4, 4), 128: (128, 128, 64, 8, 4), 256: (128, 256, 64, 8, 3)}
    for m, levels in ((16, 0), (16, 3), (64, 3), (128, 1), (256, 0)):
        bm, bn, bk, warps, stages = shapes[m]
        yield _kernel(
            module, "gemm_kernel", types.format("", "").replace("  ", " "), warps, stages, matrix=True,
            ak=1, bk=1, LEVELS=levels, BM=bm, BN=bn, BK=bk, GROUP=8, EVEN=True, FEW=bm == 16,
            FP32=False, CONTINUE=False,
        )  # fmt: skip
    # dx: w[N,K] as it lies, n summed. dw: both operands transposed, the chain continues from the main gradient.
    yield _kernel(
        module, "gemm_kernel", "*bf16 *bf16 *bf16 i32 i32:16 i32:16 i32:16 i32:16 i32", 8, 4, matrix=True,
        ak=1, bn=1, LEVELS=0, BM=128, BN=128, BK=64, GROUP=8, EVEN=True, FEW=False, FP32=False, CONTINUE=False,
    )  # fmt: skip
    yield _kernel(
        module, "gemm_kernel", "*fp32 *bf16 *bf16 i32 i32:16 i32:16 i32:16 i32:16 i32", 8, 4, matrix=True,
        am=1, bn=1, LEVELS=0, BM=128, BN=128, BK=64, GROUP=8, EVEN=False, FEW=False, FP32=True, CONTINUE=True,
    )  # fmt: skip


def _attention() -> Iterator[Kernel]:
    strides = "i32:16 i32:16 i32:16 i32:16 i32:16 fp32"
    for dim, page in ((128, 0), (64, 0), (128, 16)):
        yield _kernel(
            _ATTENTION, "attention_kernel",
            f"*bf16 *fp32 *fp32 *bf16 *bf16 *bf16 *i32 *i32 *i32 *i32 i32 i32 {strides}",
            8, 3, matrix=True, exp2=True,
            HEADS=32 if dim == 128 else 24, KV_HEADS=8, D=dim, PACK=1, ROWS=128, WIDTH=16, PARTIAL=1024, PAGE=page,
            TMA=False,
        )  # fmt: skip
    for dim, group, single, blocks in ((128, 4, False, 2), (64, 3, True, 2), (128, 2, True, 1)):
        yield _kernel(
            _DECODE, "decode_kernel",
            f"*bf16 *fp32 *fp32 *fp32 *bf16 *bf16 *bf16 *i32 *i32 *i32 i32 i32 i32 {strides}", 4, 4,
            matrix=True, exp2=True,
            HEADS=8 * group, KV_HEADS=8, D=dim, ROWS=16, WIDTH=16, PARTIAL=1024, PAGE=16, SINGLE=single, SUPER=blocks,
        )  # fmt: skip
    yield _kernel(
        _DECODE, "merge_kernel", "*bf16 *fp32 *fp32 *fp32 *i32 *i32 i32 i32", 1, exp2=True,
        HEADS=32, D=128, WIDTH=16, PARTIAL=1024, UNROLL=8,
    )  # fmt: skip
    yield _kernel(
        _BACKWARD, "row_terms_kernel", "*fp32 *bf16 *bf16 *fp32 *fp32 i32 i32:16 i32:16", 2, HEADS=32, D=128, ROWS=8
    )
    walk = "*bf16 *bf16 *bf16 *bf16 *fp32 *i32 i32 i32 i32:16 i32:16 i32:16 i32:16 fp32"
    shape = {"HEADS": 32, "KV_HEADS": 8, "D": 128, "WIDTH": 16}
    launch = backward_launch(128)
    shape |= {"matrix": True, "exp2": True}
    yield _kernel(
        _BACKWARD, "dq_kernel", f"*bf16 {walk} fp32", launch.warps, launch.stages, **shape,
        ROWS=launch.dq_rows, KEYS=launch.dq_keys,
    )  # fmt: skip
    yield _kernel(
        _BACKWARD, "dkdv_kernel", f"*fp32 *fp32 {walk}", launch.warps, launch.stages, **shape,
        KEYS=launch.kv_keys, ROWS=launch.kv_rows,
    )  # fmt: skip
    yield _kernel(_BACKWARD, "head_tree_kernel", "*bf16 *fp32 i32 fp32", 4, GROUP=5, D=128, ROWS=4)


def _logp() -> Iterator[Kernel]:
    for bm, bn, bk, warps, stages in ((16, 64, 128, 4, 4), (128, 128, 64, 8, 3)):
        tile = {"BM": bm, "BN": bn, "BK": bk, "EVEN": True, "HEATED": True}
        yield _kernel(
            _LOGP, "linear_stats_kernel",
            "*fp32 *fp32 *fp32 *bf16 *bf16 *i64 fp32 i32 i32:16 i32 i32 i32:16 i32 i32 i32 i32 i32",
            warps, stages, matrix=True, exp2=True, **tile,
        )  # fmt: skip
        yield _kernel(
            "rl_kernel.ops.linear_logp.triton_backward", "logit_gradient_kernel",
            "*bf16 *bf16 *bf16 *i64 *fp32 *fp32 fp32 i32 i32:16 i32 i32 i32:16 i32 i32:16", warps, stages, matrix=True,
            exp2=True, **tile,
        )  # fmt: skip
    yield _kernel(
        _LOGP, "merge_kernel", "*fp32 *fp32 *fp32 *fp32 *fp32 *i64 i32 *fp32 *fp32 i32 i32 i32 i32", 1, exp2=True,
        BLOCK=32, CONTINUE=False, FINISH=True, LOGP=True, UNROLL=16,
    )  # fmt: skip
    yield _kernel(
        _LOGP,
        "vocab_stats_kernel",
        "*fp32 *fp32 *fp32 *fp32 i32 i32 i32 i32",
        4,
        exp2=True,
        ROWS=16,
    )
    yield _kernel(
        _LOGP, "merge_few_kernel", "*fp32 *fp32 *fp32 *i64 i32 *fp32 *fp32 *fp32 i32 i32 i32", 8, exp2=True,
        LOGP=True, WIDTH=4096, UNROLL=64,
    )  # fmt: skip
    yield _kernel(_LOGP, "gather_logp_kernel", "*fp32 *fp32 *i64 *fp32 *fp32 i32 i32 i32", 1, BLOCK=128)


def _rows() -> Iterator[Kernel]:
    norm = "*bf16 *bf16 *bf16 *bf16 *bf16 i32 i32 i32:16 i32:16 fp32"
    for residual, chunks, rows, warps in ((False, 32, 1, 1), (True, 5, 1, 1), (False, 1, 8, 2)):
        constants = {"CHUNKS": chunks, "RESIDUAL": residual, "ROWS": rows, "EVEN": chunks != 5, "GAINS": 16}
        yield _kernel(_NORM, "rms_norm_held_kernel", norm, warps, **constants)
    for residual, chunks, rows, warps in ((False, 64, 1, 1), (True, 64, 1, 1)):
        yield _kernel(
            _NORM, "rms_norm_kernel", norm, warps, CHUNKS=chunks, RESIDUAL=residual, ROWS=rows, UNROLL=4, EVEN=True
        )
    yield _kernel(
        _NORM,
        "rms_norm_dx_kernel",
        "*bf16 *fp32 *bf16 *bf16 *bf16 i32 i32 i32:16 i32:16 i32:16 fp32",
        2,
        CHUNKS=32,
        ROWS=4,
        UNROLL=4,
        EVEN=True,
    )
    yield _kernel(
        _NORM, "rms_norm_dw_kernel", "*fp32 *fp32 *bf16 *bf16 i32 i32 i32:16 i32:16 i32:16", 1, COLUMNS=32, UNROLL=32
    )
    rope = "*bf16 *bf16 *bf16 *bf16 *fp32 *fp32 *i64 i32 i32 i32:16 i32:16 i32"
    for inverse, rows, warps in ((False, 32, 4), (True, 32, 4), (False, 8, 2)):
        yield _kernel(
            "rl_kernel.ops.rope.triton_kernel", "rope_kernel", rope, warps,
            HALF=64, WIDTH=64, ROWS=rows, INVERSE=inverse,
        )  # fmt: skip
    yield _kernel(
        "rl_kernel.ops.rope.triton_kernel", "rope_pair_kernel", rope, 4, HALF=64, WIDTH=64, X_ROWS=32, U_ROWS=8
    )
    swiglu = "rl_kernel.ops.swiglu.triton_kernel"
    yield _kernel(swiglu, "swiglu_kernel", "*bf16 *bf16 i32:16", 4, exp2=True, BLOCK=1024)
    yield _kernel(swiglu, "swiglu_backward_kernel", "*bf16 *bf16 *bf16 i32:16", 4, exp2=True, BLOCK=1024)
    embedding = "rl_kernel.ops.embedding.triton_kernel"
    yield _kernel(embedding, "embedding_kernel", "*bf16 *i64 *bf16 i32 i32:16", 4, BLOCK=1024)
    yield _kernel(embedding, "embedding_dw_kernel", "*fp32 *bf16 *i64 *i64 i32 i32 i32:16", 4, BLOCK=1024)
    yield _kernel(
        "rl_kernel.ops.residual_add.triton_kernel", "residual_add_kernel", "*bf16 *bf16 *bf16 i32", 4, BLOCK=2048
    )
    yield _kernel("rl_kernel.ops.triton_tree", "tree_sum_kernel", "*bf16 *fp32 i32", 4, RANKS=8, BLOCK=1024, FP32=False)


def _ranks() -> Iterator[Kernel]:
    module = "rl_kernel.ops.tree_all_reduce.triton_symmetric"
    for ranks in (2, 8):
        yield _kernel(
            module, "one_shot_kernel", "*bf16 *fp32 *i64 *i32 i32:16 i32", 4,
            RANKS=ranks, CAPACITY=32768, BLOCK=512, FP32=False,
        )  # fmt: skip
        yield _kernel(
            module, "two_shot_kernel", "*bf16 *fp32 *i64 *i32 i32:16 i32:16 i32 i32", 4, 1,
            RANKS=ranks, BLOCK=8192 // ranks, SUMS=1 << 20, RESULTS=1 << 24, FLAGS=1 << 25, FP32=False,
        )  # fmt: skip
    yield _kernel(
        "rl_kernel.ops.tree_all_reduce.triton_trimmed", "trimmed_kernel",
        "*bf16 *fp32 *i64 *i32 i32:16 i32:16 i32 i32", 4, 1,
        BLOCK=2048, LANES=128, SUMS=1 << 20, WHOLE=1 << 23, RESULTS=1 << 24, FLAGS=1 << 25,
    )  # fmt: skip


KERNELS = (*_products(), *_attention(), *_logp(), *_rows())
CUDA_KERNELS = tuple(_ranks())  # signals between GPUs in PTX; on ROCm partials are gathered
