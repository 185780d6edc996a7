"""What the Triton backends share about tensors on a device: where they may run, what they accept, held weights."""

from dataclasses import dataclass
from functools import cache

import torch

from rl_kernel.errors import PlanError, ShapeError

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64

# The exp2 model follows the platform: `sm90_ex2` is the instruction of Hopper, every other device computes `poly`.
EX2 = torch.version.hip is None

PROVEN = {(9, 0): "sm90"}


@cache
def _check_device(index: int) -> None:
    if torch.version.hip is not None:
        raise PlanError(
            "ROCm kernels are compiled and read, not yet run on hardware: no ROCm device has a proof. "
            "The nearest backend that has one is cuda on an H100 or H200 (sm_90), or cpu under fma32"
        )
    capability = torch.cuda.get_device_capability(index)
    if capability not in PROVEN:
        raise PlanError(
            f"{torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}, "
            "whose matrix arithmetic has no proof here; 9.0 (H100, H200) has one, and the cpu backend runs anywhere"
        )


def cdiv(x: int, y: int) -> int:
    """X / y, rounded up. Triton's own takes 1.5 µs on the host, as long as a tensor is made in."""
    return -(-x // y)


def power_of_two(x: int) -> int:
    """The smallest power of two that is no less than x >= 1."""
    return 1 << (x - 1).bit_length()


@cache
def multiprocessors(index: int) -> int:
    """How many multiprocessors the device has: programs that stay and walk their tiles start once on each."""
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count


def require(op: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Raise ShapeError unless `tensor` is a contiguous CUDA tensor of this dtype and shape (None: any size)."""
    _require(op, name, tensor, dtype, shape)
    if not tensor.is_contiguous():
        raise ShapeError(f"{op}: {name} has strides {list(tensor.stride())}; call .contiguous() on it first")


def require_rows(op: str, name: str, tensor: torch.Tensor, *shape: int | None) -> int:
    """As `require` for bf16, but rows (the first dimension) may lie apart, as in a slice of a fused projection.

    Returns the elements from one row to the next.
    """
    sizes = _require(op, name, tensor, BF16, shape)
    packed = 1
    strides = tensor.stride()
    for i in range(len(sizes) - 1, 0, -1):
        if strides[i] != packed and sizes[i] != 1:
            raise ShapeError(
                f"{op}: {name} has strides {list(strides)}; only its first dimension may lie apart, "
                "call .contiguous() on it first"
            )
        packed *= sizes[i]
    return strides[0] if sizes[0] > 1 else packed


def _require(
    op: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> tuple[int, ...]:
    """The tensor's shape. It runs several times before every launch, so it builds nothing on the way."""
    if not tensor.is_cuda:
        raise ShapeError(
            f"{op}: {name} is on {tensor.device}, the GPU backend wants a CUDA tensor; use the cpu backend"
        )
    _check_device(tensor.get_device())
    if tensor.dtype is not dtype:
        raise ShapeError(f"{op}: {name} is {tensor.dtype}, the contract stores it as {dtype}")
    sizes: tuple[int, ...] = tensor.shape
    fits = len(sizes) == len(shape)
    for want, got in zip(shape, sizes, strict=False):
        if want is not None and want != got:
            fits = False
    if not fits:
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise ShapeError(f"{op}: {name} has shape {list(sizes)}, expected [{wanted}]")
    return sizes


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight as the device kernels read it: w[N,K] bf16 itself."""

    w: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.w.shape
        return n, k

    @property
    def n(self) -> int:
        """Output features."""
        return self.shape[0]

    @property
    def k(self) -> int:
        """Input features."""
        return self.shape[1]

    def unpack(self) -> torch.Tensor:
        """Return w[N,K] bf16; not a copy."""
        return self.w


def pack(w: torch.Tensor, out: PackedWeight | None = None) -> PackedWeight:
    """Hold w[N,K] bf16; copied into `out`, where given, so that addresses in CUDA graphs stay valid."""
    require("pack", "w", w, BF16, None, None)
    if out is None:
        return PackedWeight(w)
    if out.shape != tuple(w.shape):
        raise ShapeError(f"pack: out holds a weight of shape {list(out.shape)}; w has {list(w.shape)}")
    out.w.copy_(w)
    return out


def held(op: str, w: torch.Tensor | PackedWeight) -> torch.Tensor:
    """The tensor w[N,K] of a plain or packed weight."""
    if isinstance(w, PackedWeight):
        return w.w
    require(op, "w", w, BF16, None, None)
    return w
