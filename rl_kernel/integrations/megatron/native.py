"""The control group: Megatron-core's own GPTModel (local spec, bf16) and torch's log_softmax. No contract holds."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor

from rl_kernel.integrations.megatron.gradients import zero_main_grads
from rl_kernel.integrations.megatron.model_shape import native_layout, transformer_config
from rl_kernel.integrations.megatron.packing import Packed, SeeLayer
from rl_kernel.integrations.megatron.weights import load_folder
from rl_kernel.reference.config import DecoderConfig
from rl_kernel.torch_autograd import TensorParallel

_VOCAB_MULTIPLE = 64


class NativeModel:
    """One rank's share of a stock model, with the interface of `StrictModel`."""

    def __init__(self, folder: Path, tp: TensorParallel, device: str = "cpu") -> None:
        decoder = DecoderConfig.read(folder)
        self.tp, self.device = tp, torch.device(device)
        self.layout = native_layout(decoder, vocab_tile=_VOCAB_MULTIPLE, tp_size=tp.size, rank=tp.rank)
        self.module = GPTModel(
            transformer_config(self.layout, activation_module=False),
            get_gpt_layer_local_spec(qk_layernorm=decoder.qk_norm, normalization="RMSNorm"),
            vocab_size=self.layout.padded_vocab,
            max_sequence_length=decoder.max_position,
            share_embeddings_and_output_weights=decoder.tied,
            position_embedding_type="rope",
            rotary_base=decoder.rope_theta,
        ).to(self.device, torch.bfloat16)
        self.parameters: dict[str, Tensor] = dict(self.module.named_parameters())

    def load(self, folder: Path) -> None:
        """Replace the weights by those of a Hugging Face folder; ModelError as `weights.load_folder`."""
        load_folder(folder, self.layout, self.parameters, self.tp)

    def logprobs(self, packed: Packed, temperature: float, see: SeeLayer | None = None) -> Tensor:
        """fp32 logprob of every target of `packed`; the samples are padded to the longest on the right.

        see: as in `StrictModel.logprobs`.
        """
        packed = packed.to(self.device)
        ids, real = _pad(packed)
        where = (real[0][packed.rows], real[1][packed.rows])
        positions = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        # A hook, because only rows with a target should pay for the output layer, as in the strict model.
        hook = self.module.output_layer.register_forward_pre_hook(
            lambda _, args: (args[0].transpose(0, 1)[where].unsqueeze(1), *args[1:])
        )
        with ExitStack() as hooks:
            hooks.enter_context(hook)
            for number, layer in enumerate(self.module.decoder.layers if see is not None else ()):
                hooks.enter_context(layer.register_forward_hook(_shown(see, number, real)))
            logits = self.module(ids, positions, _causal_mask(ids.shape[1], self.device), runtime_gather_output=True)
        heated = logits.squeeze(0).float()[:, : self.layout.decoder.vocab] / temperature
        return torch.log_softmax(heated, dim=-1).gather(1, packed.targets.unsqueeze(1)).squeeze(1)

    def backward(self, logprobs: Tensor, gradient: Tensor) -> None:
        """Add to every main gradient (fp32) the bf16 gradient of these logprobs."""
        logprobs.backward(gradient.to(self.device))
        for parameter in self.module.parameters():
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

    def clear_gradients(self) -> None:
        """Set every main gradient to zero: the start of a step."""
        zero_main_grads(self.module)

    def finish_gradients(self) -> None:
        """Sum the gradients of q-norm and k-norm over ranks: each rank has those of its heads."""
        if self.tp.size > 1:
            for name, parameter in self.parameters.items():
                if "q_layernorm" in name or "k_layernorm" in name:
                    torch.distributed.all_reduce(parameter.main_grad, group=self.tp.group)

    def prove(self) -> None:
        """Nothing is claimed, so nothing is proved."""


def _causal_mask(length: int, device: torch.device) -> Tensor:
    # Megatron makes the same mask itself, but on CUDA only. Padding is on the right, where causality hides it.
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)


def _shown(see: SeeLayer | None, number: int, real: tuple[Tensor, Tensor]) -> Callable[..., None]:
    """A hook on a layer, whose output [S,R,E] stands first in what it returns."""

    def hook(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if see is not None:
            see(number, output[0].detach().transpose(0, 1)[real])

    return hook


def _pad(packed: Packed) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Token ids [R,S] padded with 0, and (sample, position) of every row that is none."""
    lengths = packed.offsets.diff().long()
    ids = packed.ids.new_zeros(len(lengths), int(lengths.max()))
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths)
    ids[sample, packed.positions] = packed.ids
    return ids, (sample, packed.positions)
