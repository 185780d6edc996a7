"""What the next step's bits depend on, under Hugging Face names: a run may go on with another TP size.

    masters.safetensors  first_moments.safetensors  second_moments.safetensors  trainer.json

The weights are not there: they are the masters, rounded. Their digest is, and is checked.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl_kernel.errors import ModelError
from rl_kernel.integrations.megatron.model_shape import Layout
from rl_kernel.integrations.megatron.weights import pieces
from rl_kernel.reference.weights import map_weights
from rl_kernel.torch_autograd import TensorParallel
from services.errors import CheckpointError
from services.trainer.optimizer import AdamW
from services.trainer.tensor_file import Entry, write_tensors

_STATE = "trainer.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """updates: optimizer updates so far. weight_digest: of the weights. rng: torch's generator, hex."""

    updates: int
    weight_digest: str
    rng: str

    @classmethod
    def now(cls, updates: int, weight_digest: str) -> "Progress":
        """Take the state of torch's generator as it is."""
        return cls(updates, weight_digest, bytes(torch.get_rng_state().numpy()).hex())

    def check(self, weight_digest: str, folder: Path) -> None:
        """Raise CheckpointError unless the weights that were restored have the digest that was noted."""
        if weight_digest != self.weight_digest:
            raise CheckpointError(
                f"checkpoint {folder} gives weights with digest {weight_digest}, it was written with "
                f"{self.weight_digest}; its files are damaged"
            )


def write_checkpoint(folder: Path, progress: Progress, optimizer: AdamW, layout: Layout, tp: TensorParallel) -> None:
    """Write into `folder`, which exists. Every rank calls it; rank 0 writes. CheckpointError if the disk refuses."""
    try:
        _write(folder, progress, optimizer, layout, tp)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be written: {error.strerror or error}") from error


def _write(folder: Path, progress: Progress, optimizer: AdamW, layout: Layout, tp: TensorParallel) -> None:
    for name, tensors in _parts(optimizer).items():
        local = list(pieces(layout, tensors))
        entries = [Entry(f"{name}.{p.name}", "F32", p.shape) for p in local]
        arrays = (p.whole(tp).contiguous().cpu().numpy() for p in local)
        if tp.rank == 0:
            write_tensors(folder / f"{name}.safetensors", entries, arrays)
        else:
            for _ in arrays:
                pass
    if tp.rank == 0:
        (folder / _STATE).write_text(json.dumps(asdict(progress), indent=2) + "\n")


def read_checkpoint(folder: Path, optimizer: AdamW, layout: Layout, tp: TensorParallel) -> Progress:
    """Fill the optimizer, round its masters into the parameters. CheckpointError: something is missing or misfits."""
    try:
        progress = Progress(**json.loads((folder / _STATE).read_text()))
        mapped = map_weights(folder)
        for name, tensors in _parts(optimizer).items():
            for piece in pieces(layout, tensors):
                dtype, array = mapped[f"{name}.{piece.name}"]
                if dtype != "F32" or array.shape != piece.shape:
                    raise CheckpointError(
                        f"checkpoint {folder}: {name} of {piece.name} is {dtype}{list(array.shape)}, "
                        f"the model needs F32{list(piece.shape)}"
                    )
                piece.fill(torch.from_numpy(np.array(array)), tp)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"checkpoint {folder} has no {error.args[0]!r}; it is of another model") from None
    except (OSError, ValueError, TypeError, ModelError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from None
    for name in optimizer.masters:
        optimizer.publish(name)
    torch.set_rng_state(torch.from_numpy(np.frombuffer(bytes.fromhex(progress.rng), np.uint8).copy()))
    return progress


def _parts(optimizer: AdamW) -> Mapping[str, Mapping[str, Tensor]]:
    return {"masters": optimizer.masters, "first_moments": optimizer.first, "second_moments": optimizer.second}
