"""Which kernels a strict CUDA graph may hold: the ops' own, the library's products, and what only moves values."""

import re
import sys
from collections.abc import Iterable
from typing import Final

from triton.runtime.jit import JITFunction

from rl_kernel.ops.cuda_source import CudaKernel

# cuBLASLt's products as `gemm` calls them; a reduction over splits of K would be another sum than the contract's.
_PRODUCTS: Final = re.compile(r"nvjet|cutlass|xmma_gemm|s16816gemm|cublas", re.IGNORECASE)
_SPLIT_K: Final = re.compile(r"split.?k|stream.?k", re.IGNORECASE)
# Kernels of torch and NCCL that copy, convert, fill or gather, and never compute.
_MOVES: Final = re.compile(r"direct_copy_kernel|bfloat16_copy|CatArrayBatchedCopy|FillFunctor|nccl\w*_AllGather")
# Inductor names a kernel after what it fused, in alphabetical order, with the operators that made its inputs. Of that
# only a vocabulary shard's masking is let in: of ids that another rank owns, and of their rows.
_MASKING: Final = re.compile(
    r"triton_poi_fused__to_copy_bitwise_or(_embedding)?_ge_lt_masked_fill_sub(_tree_all_reduce)?(_unsqueeze)?_\d+"
)


def strict_kernels() -> frozenset[str]:
    """Names of all kernels, Triton, Gluon and CUDA, that the loaded modules of this package define."""
    modules = [m for name, m in sys.modules.items() if name.startswith("rl_kernel.") and m is not None]
    return frozenset(v.__name__ for m in modules for v in vars(m).values() if isinstance(v, JITFunction | CudaKernel))


def foreign_kernels(names: Iterable[str]) -> list[str]:
    """Those of `names` (as the driver has them) that no strict graph may hold, sorted."""
    ours = strict_kernels()
    return sorted({name for name in names if name not in ours and not _allowed(name)})


def _allowed(name: str) -> bool:
    return bool(
        _MOVES.search(name) or _MASKING.fullmatch(name) or (_PRODUCTS.search(name) and not _SPLIT_K.search(name))
    )
