"""A small job to break: a decoder, its weights by version, and samples drawn from it.

T tokens, V vocabulary, N tokens of a sample.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from auditor.compare import Logprobs
from auditor.faults.growing import growing
from auditor.records import Environment, Layout, Positions, RolloutRecord, Sampling, TrainerRecord
from rl_kernel.contracts import model_contract
from rl_kernel.reference.config import DecoderConfig
from rl_kernel.reference.model import Decoder, expected_tensors
from rl_kernel.reference.ops import Bits, Reference
from rl_kernel.reference.rope_table import rope_table
from rl_kernel.reference.weights import digest_tensors

I64 = npt.NDArray[np.int64]
VERSIONS: Final = 6
TINY: Final = DecoderConfig(
    model_type="qwen3", vocab=331, hidden=160, intermediate=224, layers=2, heads=4, kv_heads=2, head_dim=32,
    rms_norm_eps=1e-6, rope_theta=10_000.0, rope_scaling=None, max_position=2048, tied=False,
)  # fmt: skip
# Kept when drawing, so that a filter put on one side afterwards never excludes a token that was drawn; an engine that
# filters never draws such a token either.
_DRAWN_TOP_K: Final = 12
_DRAWN_TOP_P: Final = 0.85
_DRAWN_MIN_P: Final = 0.05
_TILE: Final = 64


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sample: tokens int64 [N], of them `prompt` in the prompt, drawn at a temperature from a weight version."""

    name: str
    tokens: I64
    prompt: int
    temperature: float
    version: int


class World:
    """Versions 1..VERSIONS of one model: each is the one before with every weight moved a little.

    folder: a Hugging Face model folder for version 1; None makes a tiny random model. seed: of everything drawn.
    """

    def __init__(self, folder: Path | None, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.contract = model_contract("portable", segments=2)
        first = Decoder.open(folder, self.contract) if folder else self._tiny()
        self._decoders = {1: first}

    def decoder(self, version: int) -> Decoder:
        """The decoder of a version."""
        for made in range(2, version + 1):
            if made not in self._decoders:
                self._decoders[made] = self.with_weights(self._moved(self._decoders[made - 1].weights))
        return self._decoders[version]

    def with_weights(self, weights: dict[str, Bits]) -> Decoder:
        """The model with other weights."""
        first = self._decoders[1]
        triples = ((name, "BF16", value) for name, value in weights.items())
        return replace(first, weights=weights, weight_digest=digest_tensors(triples, tied=first.config.tied))

    @cached_property
    def rope_digest(self) -> str:
        """Of the model's rotary table."""
        return self._decoders[1].config.rope_digest

    def draw(self, count: int, prompt: int, response: int) -> list[Drawn]:
        """`count` samples, each with a version and a temperature of its own, drawn token by token from the model."""
        vocab = self._decoders[1].config.vocab
        rows = [self.random.integers(0, vocab, prompt) for _ in range(count)]
        versions = self.random.integers(4, VERSIONS + 1, count)
        heats = self.random.choice([0.6, 0.7, 0.85, 1.2], count)
        decoders: dict[int, Decoder] = {}
        for step in range(response):
            for version in range(4, VERSIONS + 1):
                members = np.flatnonzero(versions == version)
                if members.size:
                    if not step:
                        decoders[version] = growing(self.decoder(version))
                    self._extend(decoders[version], rows, members, heats, 1 if step else prompt)
        return [
            Drawn(f"{i}", row, prompt, float(heat), int(version))
            for i, (row, heat, version) in enumerate(zip(rows, heats, versions, strict=True))
        ]

    def logprobs(self, decoder: Decoder, sample: Drawn, temperature: float | None = None) -> Logprobs:
        """What `decoder` says of a sample, float32 [N − prompt]."""
        heat = sample.temperature if temperature is None else temperature
        return decoder.logprobs([sample.tokens], [sample.prompt], heat)[0]

    def records(self, sample: Drawn) -> tuple[RolloutRecord, TrainerRecord]:
        """Both sides, sound."""
        decoder = self.decoder(sample.version)
        response = len(sample.tokens) - sample.prompt
        vocab = decoder.config.vocab
        padded = -(-vocab // _TILE) * _TILE
        common: dict[str, Any] = {
            "run_id": "faults",
            "step": 0,
            "sample_id": sample.name,
            "prompt_len": sample.prompt,
            "logprobs": self.logprobs(decoder, sample),
            "mask": np.ones(response, np.bool_),
            "sampling": Sampling(temperature=sample.temperature, seed=1),
            "weight_version": sample.version,
            "weight_digest": decoder.weight_digest,
            "contract_digest": self.contract.digest(),
            "environment": Environment("cpu", "fma32", "00" * 32),
            "layout": Layout(1, 1, vocab, padded, (0, padded)),
            "positions": Positions(self.rope_digest),
        }
        tokens = sample.tokens.astype(np.uint32)
        return (
            RolloutRecord(engine_id="rollout", tokens=tokens, **common),
            TrainerRecord(trainer_id="trainer", token_count=len(tokens), tokens=tokens, **common),
        )

    def _extend(
        self, decoder: Decoder, rows: list[I64], members: I64, heats: npt.NDArray[np.float64], new: int
    ) -> None:
        """new: the last tokens of each row, which the decoder has not seen."""
        hidden = decoder.hidden([rows[i][-new:] for i in members])
        ends = new * np.arange(1, len(members) + 1) - 1
        head = decoder.weights["model.embed_tokens.weight" if decoder.config.tied else "lm_head.weight"]
        logits = decoder.reference.gemm_fp32(hidden[ends], head)[:, : decoder.config.vocab]
        for i, row in zip(members, logits, strict=True):
            ordered = np.argsort(-row)
            weight = np.exp((row[ordered] - row[ordered[0]]).astype(np.float64) / heats[i])
            before = np.cumsum(weight) - weight
            kept = (before < _DRAWN_TOP_P * weight.sum()) & (weight >= _DRAWN_MIN_P)
            likely, weight = ordered[kept][:_DRAWN_TOP_K], weight[kept][:_DRAWN_TOP_K]
            rows[i] = np.append(rows[i], self.random.choice(likely, p=weight / weight.sum()))

    def _moved(self, weights: dict[str, Bits]) -> dict[str, Bits]:
        return {name: moved(value, 2.0**-7, self.random) for name, value in weights.items()}

    def _tiny(self) -> Decoder:
        weights = {}
        for name, shape in expected_tensors(TINY):
            draw: npt.NDArray[np.float32] = self.random.standard_normal(shape, np.float32)
            value = 1 + draw / 8 if len(shape) == 1 else draw * np.float32(1.5 * shape[-1] ** -0.5)
            weights[name] = to_bf16(np.asarray(value, np.float32))
        triples = ((name, "BF16", value) for name, value in weights.items())
        digest = digest_tensors(triples, tied=TINY.tied)
        rope = rope_table(TINY.rope_theta, TINY.head_dim, TINY.max_position)
        return Decoder(TINY, self.contract, Reference.of(self.contract), weights, digest, rope)


def moved(bits: Bits, share: float, random: np.random.Generator) -> Bits:
    """bf16 weights, each moved by about `share` of itself."""
    value = from_bf16(bits)
    return to_bf16(value * (1 + np.float32(share) * random.standard_normal(value.shape).astype(np.float32)))


def from_bf16(bits: Bits) -> npt.NDArray[np.float32]:
    """bf16 bit patterns as fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: npt.NDArray[np.float32]) -> Bits:
    """Finite fp32 rounded to bf16 bit patterns, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
