"""Which kernels a CUDA graph holds while it is being captured, as the driver names them."""

from collections import Counter
from typing import Any

from cuda.bindings import driver

from rl_kernel.errors import EvidenceError


def kernels_of_capture(stream: int) -> tuple[int, Counter[str]]:
    """(id of the capture that `stream` is in, name → number of its kernel nodes so far).

    Names are the driver's: mangled for C++, the function's own for Triton. EvidenceError if the driver will not say.
    """
    _, capture, graph, *_ = _ask(driver.cuStreamGetCaptureInfo(stream))
    _, count = _ask(driver.cuGraphGetNodes(graph))
    nodes, _ = _ask(driver.cuGraphGetNodes(graph, count))
    kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    return int(capture), Counter(_name(node) for node in nodes if _ask(driver.cuGraphNodeGetType(node))[0] == kernel)


def _name(node: Any) -> str:
    (parameters,) = _ask(driver.cuGraphKernelNodeGetParams(node))
    by_function = int(parameters.func) != 0
    asked = driver.cuFuncGetName(parameters.func) if by_function else driver.cuKernelGetName(parameters.kern)
    name: bytes = _ask(asked)[0]
    return name.decode()


def _ask(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EvidenceError(f"the CUDA driver does not say what a captured graph holds: {status!r}")
    return tuple(values)
