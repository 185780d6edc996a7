"""Megatron-core as the job's trainer: strict, or stock for the control group.

A strict engine proves itself: when it is built, the reference decoder recomputes a few logprobs to the bit, and after
every step the calls that the plan counted must be those that the model implies. EvidenceError if either fails.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from rl_kernel.compare import compare_bits
from rl_kernel.contract import ModelContract
from rl_kernel.contracts import model_contract
from rl_kernel.environment import read_environment
from rl_kernel.errors import EvidenceError, ModelError
from rl_kernel.integrations.evidence import Evidence
from rl_kernel.integrations.megatron.model import StrictModel
from rl_kernel.integrations.megatron.native import NativeModel
from rl_kernel.integrations.megatron.packing import SeeLayer, Tokens, micro_batches, pack
from rl_kernel.integrations.megatron.parallel import join_tensor_parallel
from rl_kernel.integrations.megatron.weights import bf16_bits, own_digest, pieces
from rl_kernel.ops import arch_of, strict_plan, usable_device
from rl_kernel.reference.config import DecoderConfig
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.weights import digest_tensors
from services.config import Config, Numerics
from services.engines import NATIVE, EngineFacts
from services.errors import TrainingError
from services.records import Batch, Logprobs, Sample, TrainOutcome
from services.trainer.checkpoint import Progress, read_checkpoint, write_checkpoint
from services.trainer.layers import LayerDigests
from services.trainer.loss import TokenLoss, token_loss, token_place, total
from services.trainer.optimizer import AdamW, AdamWOptions, Schedule, gradient_norm
from services.trainer.tensor_file import Entry, write_tensors

# Past the first block of 64 keys; and what is scored: one wrong logprob in three has the right bits by chance.
_WARM_UP_PROMPT: Final = 66
_WARM_UP_RESPONSE: Final = 12


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """How Megatron-core is run and the policy is trained.

    rank, rendezvous: this process among tp_size ranks, and a URL that they share (`file:///new/file`), needed from two
    ranks up. threads: CPU threads of each rank. micro_batch_tokens: in one forward and backward; changes no bit
    under fma32. Other MMA models add tokens in groups (sm90: of 16), which a cut within a group splits.
    max_grad_norm: gradients are scaled down to this L2 norm. layer_digests: of the first forward, for the auditor.
    """

    engine_id: str = "trainer-0"
    numerics: Numerics = "strict"
    profile: str = "portable"
    segments: int = 1
    tp_size: int = 1
    rank: int = 0
    rendezvous: str = ""
    threads: int = 1
    micro_batch_tokens: int = 1024
    updates_per_step: int = 1
    schedule: Schedule = Schedule(peak=1e-5)  # noqa: RUF009 (frozen)
    adamw: AdamWOptions = AdamWOptions()  # noqa: RUF009 (frozen)
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    layer_digests: bool = False

    @classmethod
    def of(cls, config: Config, *, rank: int = 0, rendezvous: str = "") -> "TrainerOptions":
        """The options that the job's config asks for, of one rank."""
        trainer = config.trainer
        return cls(
            numerics=config.numerics.mode,
            profile=config.numerics.profile,
            segments=config.numerics.segments,
            tp_size=trainer.tp_size,
            rank=rank,
            rendezvous=rendezvous,
            threads=config.numerics.threads,
            micro_batch_tokens=trainer.micro_batch_tokens,
            updates_per_step=trainer.updates_per_step,
            schedule=Schedule(trainer.learning_rate, trainer.warmup_updates, trainer.decay_updates),
            adamw=AdamWOptions(betas=trainer.betas, weight_decay=trainer.weight_decay),
            max_grad_norm=trainer.max_grad_norm,
            clip_low=trainer.clip_low,
            clip_high=trainer.clip_high,
            layer_digests=config.auditor.layer_digests,
        )


class TrainerEngine:
    """One rank of the trainer, called by one thread. All ranks are called alike, at the same time."""

    def __init__(self, model: Path, options: TrainerOptions) -> None:
        """Build the engine on the weights in `model`, a Hugging Face folder; returns when all ranks have.

        Raises ModelError or ContractError for a model or a split that has no contract, EvidenceError if strict
        numerics are not what really runs.
        """
        torch.set_num_threads(options.threads)
        self._options, self._decoder = options, DecoderConfig.read(model)
        self._config_json = (model / "config.json").read_bytes()
        contract = model_contract(options.profile, segments=options.segments)
        self._device = device = usable_device(contract)
        self._tp = join_tensor_parallel(options.tp_size, options.rank, options.rendezvous, device)
        self._contract: ModelContract | None = None
        self._model: StrictModel | NativeModel
        if options.numerics == "strict":
            self._contract = contract
            self._model = StrictModel(model, strict_plan(contract, device), self._tp)
        else:
            self._model = NativeModel(model, self._tp, device)
        self._optimizer: AdamW | None = None
        self._updates = 0
        self.load(model)
        if self._contract is not None:
            self._prove(model, self._contract)

    def facts(self) -> EngineFacts:
        """Describe this engine."""
        contract, layout = self._contract, self._model.layout
        ranks = range(self._tp.size + 1)
        return EngineFacts(
            engine_id=self._options.engine_id,
            contract_digest=contract.digest() if contract else NATIVE,
            environment=read_environment(contract.profile.mma if contract else "native", arch_of(self._device)),
            tp_size=self._tp.size,
            vocab_size=self._decoder.vocab,
            padded_vocab_size=layout.padded_vocab,
            vocab_shards=tuple(layout.padded_vocab // self._tp.size * r for r in ranks),
            rope_digest=self._decoder.rope_digest,
        )

    def load(self, folder: Path) -> str:
        """Replace the weights by those of a published folder and start the optimizer anew; return their digest."""
        if DecoderConfig.read(folder) != self._decoder:
            raise ModelError(f"{folder} holds another model than the trainer was built for: its config.json differs")
        self._model.load(folder)
        self._optimizer, self._updates = None, 0
        return own_digest(self._model.layout, self._model.parameters, self._tp)

    def score(self, samples: Sequence[Tokens], temperature: float) -> list[Logprobs]:
        """fp32 logprobs of every sample's response tokens, from a forward without gradients."""
        found: list[Logprobs] = []
        with torch.no_grad():
            for run in micro_batches(samples, self._options.micro_batch_tokens):
                part = [samples[i] for i in run]
                found += _split(part, self._logprobs(part, temperature).cpu().numpy())
        return found

    def score_batch(self, batch: Batch) -> list[Logprobs]:
        """fp32 logprobs of a batch's responses under the present weights, as `score` gives them."""
        tokens = [Tokens(s.rollout.prompt, s.rollout.response) for s in batch.samples]
        return self.score(tokens, _temperature(batch))

    def train(self, batch: Batch) -> TrainOutcome:
        """One RL step: `updates_per_step` updates on the whole batch. The logprobs returned are of the first forward.

        Raises TrainingError for a batch without an active token, or for numbers that are not finite.
        """
        temperature, active = _temperature(batch), sum(sum(s.mask) for s in batch.samples)
        if not active:
            raise TrainingError(f"step {batch.step}: no token of the batch is active; a loss needs at least one")
        first = self._update(batch, temperature, active, watch=self._options.layer_digests and self._tp.rank == 0)
        for _ in range(1, self._options.updates_per_step):
            self._update(batch, temperature, active)
        self._model.prove()
        return first

    def export(self, folder: Path) -> str:
        """Write config.json and model.safetensors into an existing folder (rank 0 does); return the digest."""
        layout, tp = self._model.layout, self._tp
        whole = [(p.name, p.shape, bf16_bits(p.whole(tp))) for p in pieces(layout, self._model.parameters)]
        if tp.rank == 0:
            (folder / "config.json").write_bytes(self._config_json)
            entries = [Entry(name, "BF16", shape) for name, shape, _ in whole]
            write_tensors(folder / "model.safetensors", entries, (bits for _, _, bits in whole))
        return digest_tensors(((name, "BF16", bits) for name, _, bits in whole), tied=self._decoder.tied)

    def save_checkpoint(self, folder: Path) -> None:
        """Write masters, moments, the count of updates and torch's generator into an existing folder."""
        digest = own_digest(self._model.layout, self._model.parameters, self._tp)
        write_checkpoint(folder, Progress.now(self._updates, digest), self._adamw(), self._model.layout, self._tp)

    def load_checkpoint(self, folder: Path) -> str:
        """Restore what `save_checkpoint` wrote, at any TP size; return the digest of the weights.

        Raises CheckpointError if it is incomplete or of another model, or if its weights fail their digest.
        """
        progress = read_checkpoint(folder, self._adamw(), self._model.layout, self._tp)
        self._updates = progress.updates
        digest = own_digest(self._model.layout, self._model.parameters, self._tp)
        progress.check(digest, folder)
        return digest

    def evidence(self) -> Evidence | None:
        """What served each op in this process so far; None for a native engine."""
        return self._model.plan.evidence() if isinstance(self._model, StrictModel) else None

    def _update(self, batch: Batch, temperature: float, active: int, watch: bool = False) -> TrainOutcome:
        """Forward and backward over the batch in its order, then one optimizer step. watch: with digests of layers."""
        layers: list[tuple[str, ...]] = []
        logprobs: list[Logprobs] = []
        losses: list[TokenLoss] = []
        tokens = [Tokens(s.rollout.prompt, s.rollout.response) for s in batch.samples]
        self._model.clear_gradients()
        for run in micro_batches(tokens, self._options.micro_batch_tokens):
            part = [tokens[i] for i in run]
            digests = LayerDigests(part) if watch else None
            new = self._logprobs(part, temperature, digests.see if digests else None)
            layers += digests.found() if digests else []
            values = new.detach().cpu().numpy()
            losses.append(self._loss(batch.step, [batch.samples[i] for i in run], values, active))
            self._model.backward(new, torch.from_numpy(losses[-1].gradient))
            logprobs += _split(part, values)
        self._model.finish_gradients()
        norm = self._step(batch.step)
        return TrainOutcome(
            logprobs=tuple(logprobs),
            loss=total([loss.loss for loss in losses]),
            grad_norm=norm,
            clip_fraction=sum(int(loss.clipped.sum()) for loss in losses) / active,
            layer_digests=tuple(layers),
        )

    def _loss(self, step: int, samples: Sequence[Sample], new: Logprobs, active: int) -> TokenLoss:
        lengths = [len(s.rollout.response) for s in samples]
        responses = [(s.rollout.sample_id, s.rollout.response) for s in samples]
        return token_loss(
            new,
            np.concatenate([s.rollout.logprobs for s in samples]),
            np.repeat(np.array([s.advantage for s in samples], np.float64), lengths),
            np.concatenate([np.array(s.mask, np.bool_) for s in samples]),
            active_in_step=active,
            clip_low=self._options.clip_low,
            clip_high=self._options.clip_high,
            place=partial(token_place, step, responses),
        )

    def _step(self, step: int) -> float:
        """Clip the gradients' norm and update the weights; return the norm before clipping."""
        layout = self._model.layout
        gradients = {name: p.main_grad for name, p in self._model.parameters.items()}
        norm = gradient_norm(pieces(layout, gradients), layout.blocks, self._tp)
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {step}: the gradient's norm is {norm}; the weights are as they were before this update"
            )
        self._updates += 1
        scale = min(1.0, self._options.max_grad_norm / norm) if norm else 1.0
        self._adamw().step(self._updates, self._options.schedule.rate(self._updates), scale)
        return norm

    def _adamw(self) -> AdamW:
        if self._optimizer is None:
            self._optimizer = AdamW(self._model.parameters, self._options.adamw)
        return self._optimizer

    def _logprobs(self, samples: Sequence[Tokens], temperature: float, see: SeeLayer | None = None) -> torch.Tensor:
        packed = pack(samples, vocab=self._decoder.vocab, max_position=self._decoder.max_position)
        return self._model.logprobs(packed, temperature, see)

    def _prove(self, model: Path, contract: ModelContract) -> None:
        room = self._decoder.max_position
        response = min(_WARM_UP_RESPONSE, room // 2)
        prompt = min(_WARM_UP_PROMPT, room - response)
        tokens = tuple(i * 7 % self._decoder.vocab for i in range(1, prompt + response + 1))
        found = self.score([Tokens(tokens[:prompt], tokens[prompt:])], 1.0)[0]
        law = Decoder.open(model, contract).logprobs([np.array(tokens, np.int64)], [prompt], 1.0)[0]
        difference = compare_bits(found, law)
        if not difference.equal:
            raise EvidenceError(
                f"{self._options.engine_id}: {difference.differing} of {difference.compared} logprobs differ from the "
                f"reference decoder's (max |Δ| {difference.largest}); strict mode needs equal bits"
            )
        self._model.prove()


def _temperature(batch: Batch) -> float:
    found = sorted({s.rollout.sampling.temperature for s in batch.samples})
    if len(found) != 1:
        raise TrainingError(f"step {batch.step} mixes the temperatures {found}; the samples of a batch need one")
    return found[0]


def _split(samples: Sequence[Tokens], flat: Logprobs) -> list[Logprobs]:
    ends = np.cumsum([len(s.response) for s in samples])
    return [np.array(part) for part in np.split(flat, ends[:-1])]
