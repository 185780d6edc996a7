"""What the loop asks of the two engines. `rollout.engine` and `trainer.engine` fulfil it; the actors add Ray around it.

An engine is made once, holds one model, and is called by one thread. Weights come from a published folder; `load`
and `export` return the digest of the tensors that the engine computes with, un-fused to Hugging Face names. (Stock vLLM
keeps no readable copy of some; a native rollout engine returns the digest of what it handed to vLLM's loader.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from rl_kernel.environment import Environment
from services.records import Batch, Logprobs, Sampling, TrainOutcome

NATIVE: Final = "native"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine is, as its records to the auditor state it.

    contract_digest: of the model contract in force; NATIVE where there is none.
    vocab_shards: token ids where the vocabulary is cut over ranks, from 0 to padded_vocab_size.
    rope_digest: of the rotary parameters in use (`rl_kernel.reference.rope_table.rope_digest`).
    logprobs_mode: `processed_logprobs` (divided by the temperature) or `raw_logprobs`.
    """

    engine_id: str
    contract_digest: str
    environment: Environment
    tp_size: int
    vocab_size: int
    padded_vocab_size: int
    vocab_shards: tuple[int, ...]
    rope_digest: str
    logprobs_mode: str = "processed_logprobs"
    cp_size: int = 1


@dataclass(frozen=True, slots=True)
class Generated:
    """One response: ids, the fp32 logprob of each, and why it ended (`stop` or `length`)."""

    tokens: tuple[int, ...]
    logprobs: Logprobs
    finish_reason: str


class RolloutEngine(Protocol):
    """Samples responses."""

    def facts(self) -> EngineFacts:
        """Describe this engine."""
        ...

    def load(self, folder: Path) -> str:
        """Replace the weights by those of a published folder, drop every cached key and value; return the digest."""
        ...

    def generate(self, prompts: Sequence[tuple[int, ...]], sampling: Sequence[Sampling]) -> list[Generated]:
        """One response a prompt, in order."""
        ...


class TrainerEngine(Protocol):
    """Scores and learns."""

    def facts(self) -> EngineFacts:
        """Describe this engine."""
        ...

    def load(self, folder: Path) -> str:
        """Replace the weights (and the optimizer's masters) by those of a published folder; return the digest."""
        ...

    def score_batch(self, batch: Batch) -> list[Logprobs]:
        """fp32 logprobs of every response of a batch, in order; changes nothing."""
        ...

    def train(self, batch: Batch) -> TrainOutcome:
        """One RL step on `batch`: a first forward whose logprobs are returned, then the updates."""
        ...

    def export(self, folder: Path) -> str:
        """Write config.json and model.safetensors into an existing folder; return the digest."""
        ...

    def save_checkpoint(self, folder: Path) -> None:
        """Write everything that the next step's bits depend on: masters, optimizer moments, step count."""
        ...

    def load_checkpoint(self, folder: Path) -> str:
        """Restore what `save_checkpoint` wrote; return the digest of the weights."""
        ...
