"""Process groups for Megatron-core: one model over `tp_size` processes, by gloo on CPUs and NCCL on GPUs."""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from rl_kernel.errors import ContractError
from rl_kernel.torch_autograd import TensorParallel


def join_tensor_parallel(tp_size: int = 1, rank: int = 0, rendezvous: str = "", device: str = "cpu") -> TensorParallel:
    """Make this process rank `rank` of `tp_size`; every rank calls it, and returns when all have.

    rendezvous: a URL that torch.distributed accepts and all ranks share (`file:///…` on one host, `tcp://host:port`);
    needed from two ranks up. device: `cpu`, or `cuda`: this process then takes the GPU of its rank among those it sees.
    Called again with the same size, it returns the group that exists. ContractError where the ranks are cut otherwise.
    """
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if not torch.cuda.is_available():
        # Megatron asks for the current CUDA device where it means "the device of the model".
        torch.cuda.current_device = lambda: torch.device("cpu")
    if not dist.is_initialized():
        _initialize(tp_size, rank, rendezvous, "nccl" if device == "cuda" else "gloo")
    elif dist.get_world_size() != tp_size:
        raise ContractError(f"this process is one of {dist.get_world_size()} ranks; TP {tp_size} needs new processes")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_size)
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() != tp_size:  # somebody initialised Megatron before, and cut the ranks in another way
        raise ContractError(
            f"Megatron's tensor-parallel group here has {group.size()} of {tp_size} ranks; there is no contract for "
            f"pipeline, context or data parallel ranks: initialise it with tensor_model_parallel_size={tp_size} alone"
        )
    return TensorParallel(group.rank(), tp_size, group if tp_size > 1 else None)


def leave_tensor_parallel() -> None:
    """Destroy the groups, so that the process may join another."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _initialize(tp_size: int, rank: int, rendezvous: str, backend: str) -> None:
    if tp_size == 1 or rendezvous.startswith("file://"):
        # One host: loopback, so that a machine without a resolvable name can run too.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if tp_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif not rendezvous:
        raise ContractError(f"TP {tp_size} needs a rendezvous that its ranks share, such as file:///path/to/new/file")
    else:
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=tp_size)
