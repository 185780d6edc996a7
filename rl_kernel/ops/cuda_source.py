"""CUDA C++ of this package: compiled at run time for Hopper, once a process, and launched in clusters.

For what Gluon cannot say: programs that write into each other's shared memory.
"""

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from rl_kernel.errors import PlanError

try:
    from cuda.bindings import driver, nvrtc
except ImportError:  # comes with torch for CUDA; nothing is compiled or launched without
    driver = nvrtc = None

MOST_SHARED = 227 * 1024  # bytes of shared memory that a program may have
Constants = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """Programs, threads and shared bytes of each, and how many of them make up a cluster."""

    programs: int
    threads: int
    shared: int
    cluster: int


@dataclass(frozen=True)
class CudaKernel:
    """The function `__name__` of a source file of this folder; each set of constants is compiled by itself."""

    source: str
    __name__: str

    def launch(self, constants: Constants, how: Launch, arguments: list[Any], device: int, stream: int) -> None:
        """Launch on `stream` as a dependent launch (see `dependent_launch`).

        arguments: ctypes values and `TensorMap`s. PlanError if the source does not compile or the driver refuses.
        """
        function = _function(self.source, self.__name__, constants, device, how.shared)
        places = [x.getPtr() if hasattr(x, "getPtr") else ctypes.addressof(x) for x in arguments]
        values = (ctypes.c_void_p * len(places))(*places)
        status = driver.cuLaunchKernelEx(_config(how, stream), function, ctypes.addressof(values), 0)
        ask(status, f"launch {self.__name__}")


@lru_cache(maxsize=1 << 10)
def _config(how: Launch, stream: int) -> Any:
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttributeID
    config.gridDimX, config.gridDimY, config.gridDimZ = how.programs, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = how.threads, 1, 1
    config.sharedMemBytes, config.hStream = how.shared, driver.CUstream(stream)
    clusters, early = driver.CUlaunchAttributeValue(), driver.CUlaunchAttributeValue()
    clusters.clusterDim.x, clusters.clusterDim.y, clusters.clusterDim.z = how.cluster, 1, 1
    early.programmaticStreamSerializationAllowed = 1
    config.attrs = [
        _attribute(attribute.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, clusters),
        _attribute(attribute.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, early),
    ]
    config.numAttrs = 2
    return config


def _attribute(which: Any, value: Any) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id, attribute.value = which, value
    return attribute


@lru_cache(maxsize=1 << 14)
def tensor_map(address: int, rows: int, columns: int, stride: int, box_rows: int) -> Any:
    """A bf16 matrix as the bulk copy engine reads it: boxes of box_rows by 64 columns, swizzled by 128 bytes.

    stride: elements from one row to the next. It holds the address and no reference to what lies there.
    """
    _need_driver()
    kind = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    sizes, strides = [driver.cuuint64_t(x) for x in (columns, rows)], [driver.cuuint64_t(2 * stride)]
    box, every = [driver.cuuint32_t(x) for x in (64, box_rows)], [driver.cuuint32_t(1)] * 2
    (found,) = ask(
        driver.cuTensorMapEncodeTiled(
            kind, 2, address, sizes, strides, box, every,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"describe a matrix of {rows} x {columns}",
    )  # fmt: skip
    return found


@cache
def compiled(source: str, constants: Constants) -> bytes:
    """The machine code (sm_90a) of a source file of this folder. PlanError with what the compiler says, if it fails."""
    text = (Path(__file__).parent / source).read_bytes()
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"--fmad=false"]
    options += [f"-D{name}={value}".encode() for name, value in constants]
    (program,) = ask(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []), f"read {source}")
    status, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        (size,) = ask(nvrtc.nvrtcGetProgramLogSize(program), f"compile {source}")
        said = b" " * size
        nvrtc.nvrtcGetProgramLog(program, said)
        raise PlanError(f"{source} does not compile with {dict(constants)}: {said.decode(errors='replace').strip()}")
    (size,) = ask(nvrtc.nvrtcGetCUBINSize(program), f"compile {source}")
    code: bytes = b" " * size
    ask(nvrtc.nvrtcGetCUBIN(program, code), f"compile {source}")
    return code


@cache
def _function(source: str, name: str, constants: Constants, device: int, shared: int) -> Any:
    """The function in the context of `device`, which is the current one, allowed `shared` bytes."""
    _need_driver()
    (module,) = ask(driver.cuModuleLoadData(compiled(source, constants)), f"load {source}")
    (function,) = ask(driver.cuModuleGetFunction(module, name.encode()), f"find {name}")
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    ask(driver.cuFuncSetAttribute(function, most, shared), f"give {name} {shared} bytes of shared memory")
    return function


def _need_driver() -> None:
    if driver is None:
        raise PlanError(
            "the package cuda-bindings is missing, which launches kernels in CUDA; torch for CUDA comes with it, "
            "or: pip install cuda-bindings"
        )


def ask(answer: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """What the driver or compiler answered, without its status; PlanError if that is no success."""
    status, *values = answer
    if int(status):
        raise PlanError(f"the CUDA driver could not {what}: {status!r}; an H100 or H200 with driver 580 can")
    return tuple(values)
