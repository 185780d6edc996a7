"""The product with a tree over segments on Hopper, in clusters: programs that share a tile, or read the same operands.

Where tiles are too few for the device the programs of a tile are a cluster: each sums neighbouring segments, and the
upper levels of the tree join them through each other's shared memory (`cluster_matmul.cu`). A cluster is placed on the
device as a whole, so that none waits for one that is not there. Elsewhere a program has a tile alone, and a cluster of
two only places neighbours side by side: with few rows of tiles, what both read then comes once from the L2.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from rl_kernel.ops.accelerator import cdiv, multiprocessors
from rl_kernel.ops.cuda_source import MOST_SHARED, Constants, CudaKernel, Launch, tensor_map

BK = 64
SEGMENTS = (2, 4, 8)
MIN_ROWS = 17  # below, kernels with narrow tiles read the weight faster
NARROW = 96  # columns of a tile between 64 and 128
SHARED_COPIES = 160 * 1024  # bytes that programs of a tile have under way at most; with more, seen, they are slower
NEIGHBOURS = 2  # programs of a cluster that share no tile
ROUNDS = 4  # tiles of a program of many rows; with more of them `gluon_matmul` is the faster
ALIGNED = 2048  # bytes of shared memory for barriers, and for tiles to begin where the copy engine wants

gemm_cluster_kernel = CudaKernel("cluster_matmul.cu", "gemm_cluster_kernel")


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows and columns of a tile, and programs that share one. It may change speed only."""

    bm: int
    bn: int
    split: int

    @property
    def received(self) -> int:
        """Bytes for the sums of other programs; of one alone, for a sum that waits, or for rows of y as they leave."""
        if self.split > 1:
            return self.bm * (self.bn - self.bn // self.split) * 4
        return self.bm * self.bn * 4 if self.bn > NARROW else self.bm * (self.bn // 2 + 4) * 4

    @property
    def stages(self) -> int:
        """Copies under way."""
        room = MOST_SHARED - ALIGNED - self.received
        return (min(SHARED_COPIES, room) if self.split > 1 else room) // ((self.bm + self.bn) * BK * 2)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a program."""
        return self.stages * (self.bm + self.bn) * BK * 2 + self.received + ALIGNED


@lru_cache(maxsize=1 << 12)
def shape_for(m: int, n: int, segments: int, processors: int, rows_of_b: bool) -> Shape | None:
    """The static table: a function of the shape, the layout and the device alone. None where `gluon_matmul` is due."""
    bm, bn = (64, 64) if m <= 64 else (128, 64) if m <= 128 else (128, 128)
    tiles = cdiv(m, bm) * cdiv(n, bn)
    split = 1
    # Clusters of two fill a device; of four and eight some multiprocessors are left over (seen: 30 of 33 fours).
    while 2 * split <= segments and 2 * split * tiles <= (processors if split == 1 else processors * 7 // 8):
        split *= 2
    if split > 1:
        return Shape(bm, bn, split)
    if not rows_of_b:
        return None
    if m > 256:
        return Shape(128, 128, 1) if segments == 8 and tiles <= ROUNDS * processors else None
    if m <= 128 and 2 * cdiv(n, NARROW) <= processors:
        return Shape(bm, NARROW, 2)

    def columns(width: int) -> int:
        """That the busiest program computes."""
        return cdiv(cdiv(m, bm) * cdiv(n, width), processors) * width

    return Shape(bm, bn if columns(bn) < columns(NARROW) else NARROW, 1)


def serves(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, segments: int) -> bool:
    """Whether this kernel computes y = a @ b: rows enough but not many, whole steps in a segment, straight operands."""
    (m, total), n = a.shape, b.shape[1]
    rows_of_b = b.stride(0) == 1
    strides = (a.stride(0), b.stride(1) if rows_of_b else b.stride(0), n)
    straight = a.stride(1) == 1 and (rows_of_b or b.stride(1) == 1) and a.stride(0) >= total
    aligned = all(s % 8 == 0 for s in strides) and (a.data_ptr() | b.data_ptr() | y.data_ptr()) % 16 == 0
    whole = segments in SEGMENTS and total > 0 and total % (segments * BK) == 0
    if not straight or not aligned or not whole or m < MIN_ROWS or not n:
        return False
    return shape_for(m, n, segments, multiprocessors(y.get_device()), rows_of_b) is not None


def cluster_product(
    y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, segments: int, shape: Shape | None = None
) -> torch.Tensor:
    """y[m,n] (bf16 or fp32) <- tree over segments of a[m,s] @ b[s,n]; see `serves`. A `shape` of 96 needs b.t()."""
    (m, total), n = a.shape, b.shape[1]
    device = y.get_device()
    processors, rows_of_b = multiprocessors(device), b.stride(0) == 1
    shape = shape or shape_for(m, n, segments, processors, rows_of_b)
    assert shape is not None
    left = tensor_map(a.data_ptr(), m, total, a.stride(0), shape.bm)
    right = (
        tensor_map(b.data_ptr(), n, total, b.stride(1), shape.bn)
        if rows_of_b
        else tensor_map(b.data_ptr(), total, n, b.stride(0), BK)
    )
    gemm_cluster_kernel.launch(
        *_how(m, n, segments, shape, processors, rows_of_b, y.dtype == torch.float32),
        [left, right, ctypes.c_void_p(y.data_ptr()), *map(ctypes.c_int, (m, n, total // BK // shape.split))],
        device,
        torch.cuda.current_stream(device).cuda_stream,
    )
    return y


@lru_cache(maxsize=1 << 12)
def _how(
    m: int, n: int, segments: int, shape: Shape, processors: int, rows_of_b: bool, fp32: bool
) -> tuple[Constants, Launch]:
    programs, cluster = cdiv(m, shape.bm) * cdiv(n, shape.bn) * shape.split, shape.split
    if cluster == 1:  # programs stay, and one without a tile ends at once
        cluster = NEIGHBOURS
        most = processors // cluster
        if shape.bn == NARROW:  # as few as need no tile more each: what they read is waited for
            most = min(most, cdiv(cdiv(programs, cdiv(programs, most * cluster)), cluster))
        programs = min(cdiv(programs, cluster), most) * cluster
    threads = 384 if shape.bm == 128 else 160
    return constants(shape, segments, rows_of_b, fp32), Launch(programs, threads, shape.shared, cluster)


def constants(shape: Shape, segments: int, rows_of_b: bool, fp32: bool) -> Constants:
    """What `cluster_matmul.cu` is compiled for."""
    return (
        ("BM", shape.bm), ("BN", shape.bn), ("SEGMENTS", segments // shape.split), ("SPLIT", shape.split),
        ("STAGES", shape.stages), ("ROWS_OF_B", int(rows_of_b)), ("FP32", int(fp32)),
    )  # fmt: skip
