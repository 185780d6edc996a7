"""What passes between the parts of the job: frozen, with no behaviour beyond simple properties.

Token ids are tuples of Python ints (they index); log-probabilities are fp32 arrays whose bits are the product.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Logprobs = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """One published set of weights.

    WeightVersion(version=3, digest="9f2c…", folder=Path("runs/a/weights/v000003"))
    """

    version: int
    digest: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question whose answer can be checked.

    Prompt(tokens=(216, 34, 27, 35, 45), answer="5")
    """

    tokens: tuple[int, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one response is drawn.

    Sampling(temperature=1.0, seed=7041, max_new_tokens=6, stop_token_ids=(198,))
    """

    temperature: float
    seed: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One response to be drawn.

    Request(sample_id="003-01", prompt=(216, 34), sampling=Sampling(…))
    """

    sample_id: str
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Rollout:
    """One response as the rollout engine gave it: logprobs[i] belongs to response[i].

    Rollout(sample_id="003-01", prompt=(216, 34), response=(37, 198), logprobs=np.float32([-0.71, -0.02]),
            finish_reason="stop", sampling=Sampling(…), weights=WeightVersion(…))
    """

    sample_id: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: Logprobs
    finish_reason: str
    sampling: Sampling
    weights: WeightVersion


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout with its reward, and its advantage over the other answers to the same prompt.

    Sample(rollout=Rollout(…), mask=(True, True), reward=1.0, advantage=1.32)

    mask: one flag a response token; the loss counts those that are True.
    """

    rollout: Rollout
    mask: tuple[bool, ...]
    reward: float
    advantage: float


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on. The order of the samples is the logical order of every sum over tokens.

    Batch(step=3, weights=WeightVersion(…), samples=(Sample(…), …))
    """

    step: int
    weights: WeightVersion
    samples: tuple[Sample, ...]

    @property
    def response_tokens(self) -> int:
        """Tokens that the loss counts."""
        return sum(sum(s.mask) for s in self.samples)

    @property
    def mean_reward(self) -> float:
        """Mean over samples."""
        return float(np.mean([s.reward for s in self.samples]))


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """What the trainer says after a step.

    TrainOutcome(logprobs=(np.float32([…]), …), loss=-0.013, grad_norm=0.84, clip_fraction=0.0)

    logprobs: of its first forward on the batch, one fp32 array a sample, response tokens only. layer_digests: of the
    same forward, one tuple a sample, empty where none were asked for.
    """

    logprobs: tuple[Logprobs, ...]
    loss: float
    grad_norm: float
    clip_fraction: float
    layer_digests: tuple[tuple[str, ...], ...] = ()
