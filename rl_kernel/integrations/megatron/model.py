"""A GPTModel of Megatron-core in which every op on the path to a logprob, and back, is strict."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rl_kernel.contract import ModelContract
from rl_kernel.errors import EvidenceError, ModelError
from rl_kernel.integrations.evidence import CountingPlan
from rl_kernel.integrations.megatron.attention import PackedRows
from rl_kernel.integrations.megatron.gradients import clear_gradients, finish_gradients
from rl_kernel.integrations.megatron.logp import LinearLogp
from rl_kernel.integrations.megatron.model_shape import Layout, strict_layout, transformer_config
from rl_kernel.integrations.megatron.packing import Packed, SeeLayer
from rl_kernel.integrations.megatron.pointwise import StrictRopeTable
from rl_kernel.integrations.megatron.proof import Passes, refuse_foreign_modules
from rl_kernel.integrations.megatron.spec import strict_block_spec
from rl_kernel.integrations.megatron.vocabulary import StrictEmbedding, StrictOutputLayer
from rl_kernel.integrations.megatron.weights import load_folder
from rl_kernel.plan import Plan
from rl_kernel.reference.config import DecoderConfig
from rl_kernel.reference.rope_table import rope_table
from rl_kernel.torch_autograd import StrictOps, TensorParallel


class StrictGPTModel(GPTModel):
    """GPTModel whose last step is logprobs: `labels` are the targets of `packed_seq_params.rows`."""

    def _postprocess(self, hidden_states: Tensor, *, labels: Tensor, packed_seq_params: PackedRows, **_: Any) -> Tensor:
        logprobs: Tensor = self.output_layer(
            hidden_states, packed_seq_params.rows, labels, packed_seq_params.temperature
        )
        return logprobs


class StrictModel:
    """One rank's share of a strict model: logprobs, gradients, and the proof of what computed them.

    layout, tp: which share it is. parameters: Megatron name → parameter, in Megatron's order. device: the plan's, of
    this process.
    """

    def __init__(self, folder: Path, plan: Plan, tp: TensorParallel) -> None:
        decoder, contract = DecoderConfig.read(folder), plan.contract
        self.tp, self.layout, self.device = tp, _layout(decoder, contract, tp), torch.device(plan.device)
        self.plan = CountingPlan(plan, engine="megatron", rank=tp.rank)
        self._ops = StrictOps(self.plan.function, contract.segments, tp)
        self.module = _build(self.layout, self._ops, self.plan).to(self.device)
        self.parameters: dict[str, Tensor] = dict(self.module.named_parameters())
        self._passes = Passes()
        self._loaded = False

    def load(self, folder: Path) -> None:
        """Replace the weights by those of a Hugging Face folder; ModelError as `weights.load_folder`."""
        load_folder(folder, self.layout, self.parameters, self.tp)
        self._loaded = True

    def logprobs(self, packed: Packed, temperature: float, see: SeeLayer | None = None) -> Tensor:
        """fp32 logprob of every target of `packed`, on the model's device; differentiable unless under no_grad().

        see: called with the number and the output, bf16 [T,E], of each layer.
        Raises EvidenceError if a module of the model is not ours, ModelError before the first `load`.
        """
        if not self._loaded:
            raise ModelError("megatron: the model has no weights yet; load() a folder first")
        refuse_foreign_modules(self.module)
        self._passes.forward += 1
        packed = packed.to(self.device)
        rows = PackedRows(
            qkv_format="thd",
            cu_seqlens_q=packed.offsets,
            cu_seqlens_kv=packed.offsets,
            positions=packed.positions,
            rows=packed.rows,
            temperature=temperature,
        )
        with self._seen_by(see):
            logprobs: Tensor = self.module(
                packed.ids.unsqueeze(0),
                packed.positions.unsqueeze(0),
                None,
                labels=packed.targets,
                packed_seq_params=rows,
            )
        return logprobs

    @contextmanager
    def _seen_by(self, see: SeeLayer | None) -> Iterator[None]:
        """A layer ends with the addition behind its MLP. No hook: the proof refuses any."""
        ends = [layer.mlp_bda for layer in self.module.decoder.layers] if see is not None else []
        for number, end in enumerate(ends):
            end.see = lambda rows, number=number: see and see(number, rows.reshape(-1, rows.shape[-1]))
        try:
            yield
        finally:
            for end in ends:
                end.see = None

    def backward(self, logprobs: Tensor, gradient: Tensor) -> None:
        """Continue every main gradient by the part of these logprobs, whose gradient is `gradient` (fp32).

        The logprobs must have been asked for after `clear_gradients`; EvidenceError if there was none.
        """
        if any(getattr(parameter, "main_grad", None) is None for parameter in self.parameters.values()):
            raise EvidenceError("megatron: there are no main gradients to continue; clear_gradients() begins a step")
        self._passes.backward += 1
        logprobs.backward(gradient.to(self.device))

    def clear_gradients(self) -> None:
        """Set every main gradient to zero: the start of a step."""
        clear_gradients(self.module)

    def finish_gradients(self) -> None:
        """Complete the main gradients after a step's last backward."""
        self._passes.steps += 1
        finish_gradients(self.module, self._ops)

    def prove(self) -> None:
        """Raise EvidenceError unless the plan served exactly the calls that the passes so far imply."""
        self.plan.evidence().require(self._passes.expected_calls(self.layout))


def _layout(decoder: DecoderConfig, contract: ModelContract, tp: TensorParallel) -> Layout:
    tile = contract["linear_logp"].parameter("vocab_tile")
    return strict_layout(decoder, segments=contract.segments, vocab_tile=tile, tp_size=tp.size, rank=tp.rank)


def _build(layout: Layout, ops: StrictOps, plan: CountingPlan) -> StrictGPTModel:
    decoder = layout.decoder
    model = StrictGPTModel(
        transformer_config(layout, activation_module=True),
        strict_block_spec(layout, ops),
        vocab_size=layout.padded_vocab,
        max_sequence_length=decoder.max_position,
        share_embeddings_and_output_weights=decoder.tied,
        position_embedding_type="rope",
    )
    # GPTModel names these three classes itself; no spec reaches them.
    cos, sin = rope_table(decoder.rope_theta, decoder.head_dim, decoder.max_position, decoder.rope_scaling)
    model.rotary_pos_emb = StrictRopeTable(torch.from_numpy(cos), torch.from_numpy(sin))
    embedding = model.embedding.word_embeddings.weight
    model.embedding.word_embeddings = StrictEmbedding(embedding, layout.vocab_start, ops=ops)
    head = embedding if decoder.tied else model.output_layer.weight
    logp = LinearLogp(ops, plan.function, layout.vocab_start, decoder.vocab)
    model.output_layer = StrictOutputLayer(head, logp)
    return model
