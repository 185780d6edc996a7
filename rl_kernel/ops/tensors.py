"""What every CPU op needs to know about its tensors: cheap checks, addresses, and the number of threads.

A decode step calls some three hundred ops, so a check costs a few hundred nanoseconds at most and builds no string
unless it fails. torch is imported before the extension: both then share torch's OpenMP runtime, and with it one pool
of threads and the thread count of `torch.set_num_threads` and OMP_NUM_THREADS.
"""

import torch

from rl_kernel.errors import ShapeError
from rl_kernel.ops import _cpu

__all__ = ["BF16", "F32", "I32", "I64", "check", "check_rows", "check_same", "extension", "require", "threads"]

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
extension = _cpu
threads = torch.get_num_threads


def require(ok: bool, message: str) -> None:
    """Raise ShapeError(message) unless `ok`; for checks that run once, since the message is always built."""
    if not ok:
        raise ShapeError(message)


def check(op: str, name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Raise ShapeError unless `x` is a contiguous CPU tensor of `dtype` and `shape` (None: any extent)."""
    if x.dtype is not dtype or x.dim() != len(shape) or not x.is_contiguous() or not x.is_cpu:
        raise ShapeError(_complaint(op, name, x, dtype, shape))
    for have, want in zip(x.shape, shape, strict=True):
        if want is not None and have != want:
            raise ShapeError(_complaint(op, name, x, dtype, shape))


def check_rows(op: str, name: str, x: torch.Tensor, shape: tuple[int | None, ...]) -> int:
    """As `check` for bf16, but rows (the first dimension) may lie apart, as in a slice of a fused projection.

    Returns the elements from one row to the next.
    """
    if x.dtype is not BF16 or x.dim() != len(shape) or not x.is_cpu:
        raise ShapeError(_complaint(op, name, x, BF16, shape))
    packed = 1
    for have, want, stride in zip(reversed(x.shape[1:]), reversed(shape[1:]), reversed(x.stride()[1:]), strict=True):
        if (want is not None and have != want) or (stride != packed and have != 1):
            raise ShapeError(_complaint(op, name, x, BF16, shape))
        packed *= have
    if shape[0] is not None and x.shape[0] != shape[0]:
        raise ShapeError(_complaint(op, name, x, BF16, shape))
    return int(x.stride(0)) if x.shape[0] > 1 else packed


def check_same(op: str, name: str, x: torch.Tensor, like: torch.Tensor) -> None:
    """Raise ShapeError unless `x` is a contiguous CPU tensor with the dtype and shape of `like`."""
    if x.dtype is not like.dtype or x.shape != like.shape or not x.is_contiguous() or not x.is_cpu:
        raise ShapeError(_complaint(op, name, x, like.dtype, tuple(like.shape)))


def _complaint(op: str, name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> str:
    want = ", ".join("any" if n is None else str(n) for n in shape)
    layout = "" if x.is_contiguous() else f", strides {list(x.stride())}"
    return (
        f"{op}: {name} is {x.dtype} {list(x.shape)} on {x.device}{layout}; "
        f"it must be contiguous {dtype} [{want}] on cpu"
    ).replace("torch.", "")
