"""Main gradients: fp32, one for each parameter, filled by the backward passes of a step and finished after the last."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel.integrations.megatron.pointwise import StrictRmsNorm
from rl_kernel.integrations.megatron.vocabulary import StrictEmbedding
from rl_kernel.torch_autograd import StrictOps


def zero_main_grads(model: torch.nn.Module) -> None:
    """Set every main gradient to +0, making it where there is none yet."""
    for parameter in model.parameters():
        if getattr(parameter, "main_grad", None) is None:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        else:
            parameter.main_grad.zero_()


def clear_gradients(model: torch.nn.Module) -> None:
    """Make a strict model ready for a step: main gradients of +0, and nothing kept from before."""
    zero_main_grads(model)
    for norm in _norms(model):
        grad = norm.weight.main_grad
        # A norm of the whole row writes into its main gradient; one of heads keeps one row a head.
        norm.weight.head_grads = grad.new_zeros(norm.heads, len(grad)) if norm.heads else grad.view(1, -1)
    for embedding in _embeddings(model):
        embedding.weight.embedding_grads = []


def finish_gradients(model: torch.nn.Module, ops: StrictOps) -> None:
    """After the step's last backward: add what the embedding kept, and put the heads' gradients together."""
    for embedding in _embeddings(model):
        embedding.add_kept_grads()
    for norm in _norms(model):
        if norm.heads:
            norm.weight.main_grad.copy_(ops.tree_sum(_all_heads(norm.weight.head_grads, ops), torch.float32))


def _all_heads(mine: Tensor, ops: StrictOps) -> Tensor:
    """The heads of all ranks in order: their tree is over heads, not over ranks."""
    if ops.tp.size == 1:
        return mine
    parts = [torch.empty_like(mine) for _ in range(ops.tp.size)]
    dist.all_gather(parts, mine, group=ops.tp.group)
    return torch.cat(parts)


def _norms(model: torch.nn.Module) -> Iterator[StrictRmsNorm]:
    return (m for m in model.modules() if isinstance(m, StrictRmsNorm))


def _embeddings(model: torch.nn.Module) -> Iterator[StrictEmbedding]:
    return (m for m in model.modules() if isinstance(m, StrictEmbedding))
