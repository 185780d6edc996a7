"""What the next step's bits depend on, under Hugging Face names: a run may go on with another TP size.

    masters.safetensors  first_moments.safetensors  second_moments.safetensors  trainer.json

trainer.json holds the sha256 of each file and of itself, checked before anything is used: a moment's last bit counts
as much as a weight's first. The weights are not there: they are the masters, rounded. Their digest is, and is checked.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rl_kernel.errors import ModelError
from rl_kernel.integrations.megatron.model_shape import Layout
from rl_kernel.integrations.megatron.weights import pieces
from rl_kernel.reference.weights import map_weights
from rl_kernel.torch_autograd import TensorParallel
from services.errors import CheckpointError
from services.stored import Stored
from services.trainer.optimizer import AdamW
from services.trainer.tensor_file import Entry, write_tensors

_STATE = "trainer.json"


class Progress(Stored):
    """updates: optimizer updates so far. weight_digest: of the weights. rng: torch's generator, hex.

    files: name → sha256 of every other file. digest: sha256 of the rest of this one.
    """

    updates: int = Field(ge=0)
    weight_digest: str
    rng: str = Field(pattern=r"^([0-9a-f]{2})+$")
    files: dict[str, str]
    digest: str

    @classmethod
    def now(cls, updates: int, weight_digest: str) -> "Progress":
        """Take the state of torch's generator as it is."""
        rng = bytes(torch.get_rng_state().numpy()).hex()
        return cls(updates=updates, weight_digest=weight_digest, rng=rng, files={}, digest="")

    def sealed(self, folder: Path, names: Iterable[str]) -> "Progress":
        """With the digests of the files in `folder`, and its own."""
        filled = self.model_copy(update={"files": {name: _sha256(folder / name) for name in names}})
        return filled.model_copy(update={"digest": filled._own_digest()})

    def check_files(self, folder: Path, names: Iterable[str]) -> None:
        """Raise CheckpointError unless every file, and this one, is as it was written."""
        found = {_STATE: self._own_digest(), **{name: _sha256(folder / name) for name in names}}
        written = {_STATE: self.digest, **self.files}
        for name, digest in found.items():
            if digest != written.get(name):
                raise CheckpointError(
                    f"checkpoint {folder}: {name} has sha256 {digest}, it was written with "
                    f"{written.get(name)}; its files are damaged"
                )

    def _own_digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"digest"}).encode()).hexdigest()

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
            write_tensors(folder / _file_of(name), entries, arrays)
        else:
            for _ in arrays:
                pass
    if tp.rank == 0:
        sealed = progress.sealed(folder, map(_file_of, _parts(optimizer)))
        (folder / _STATE).write_text(sealed.text(), encoding="utf-8")


def read_checkpoint(folder: Path, optimizer: AdamW, layout: Layout, tp: TensorParallel) -> Progress:
    """Fill the optimizer, round its masters into the parameters. CheckpointError: incomplete, damaged, or a misfit."""
    progress = Progress.read(folder / _STATE)
    try:
        progress.check_files(folder, map(_file_of, _parts(optimizer)))
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
    _set_generator(progress.rng, folder)
    return progress


def _parts(optimizer: AdamW) -> Mapping[str, Mapping[str, Tensor]]:
    return {"masters": optimizer.masters, "first_moments": optimizer.first, "second_moments": optimizer.second}


def _file_of(part: str) -> str:
    return f"{part}.safetensors"


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _set_generator(state: str, folder: Path) -> None:
    try:
        torch.set_rng_state(torch.from_numpy(np.frombuffer(bytes.fromhex(state), np.uint8).copy()))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"checkpoint {folder}: rng is no state of torch's generator: {reason}") from None
