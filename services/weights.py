"""Weights by version and digest: written to one side, checked, renamed into place, confirmed by both engines.

    <root>/v000001/{model.safetensors, config.json, manifest.json}

A version's folder appears complete or not at all, and is never written again. The digest is that of
`rl_kernel.reference.weights`; each engine computes it from the tensors that it computes with, not from this folder.
"""

import errno
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rl_kernel.errors import ModelError, WeightDigestError
from rl_kernel.reference.weights import check_weight_digest, weight_digest
from services.durable import sync, sync_folder
from services.errors import PublishError
from services.records import WeightVersion

MANIFEST = "manifest.json"
_IS_VERSION = re.compile(r"v\d{6,}")
Write = Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class WeightStore:
    """The folder of all published versions. keep: how many of the newest survive `prune`."""

    root: Path
    keep: int

    def publish(self, version: int, write: Write) -> WeightVersion:
        """Make version `version` from what `write(folder)` writes there; it returns the digest of its own memory.

        The same bits may be published again, as a resumed run does. Raises PublishError if the version exists with
        other bits, if the bytes on disk are not those of the digest, or if the disk is full; then nothing is left.
        """
        final, scratch = self.folder(version), self.root / f".v{version:06d}.partial"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            scratch.mkdir(parents=True)
            digest = write(scratch)
            found = weight_digest(scratch)
            if found != digest:
                raise PublishError(f"weight version {version}: {found} was written, the trainer holds {digest}")
            if final.exists():
                return self._same_again(version, digest)
            manifest = {"weight_version": version, "weight_digest": digest}
            (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            sync_folder(scratch)
            scratch.rename(final)
            sync(self.root)
        except OSError as error:
            raise _disk_error(error, version, self.root) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return WeightVersion(version, digest, final)

    def _same_again(self, version: int, digest: str) -> WeightVersion:
        present = self.receive(version)
        if present.digest != digest:
            raise PublishError(
                f"weight version {version} exists already in {self.root} with digest {present.digest}, not {digest}; "
                f"versions are never rewritten"
            )
        return present

    def import_model(self, version: int, model: Path) -> WeightVersion:
        """Publish the weights of a model folder, e.g. as the first version of a run."""
        return self.publish(version, lambda folder: _copy_model(model, folder))

    def receive(self, version: int) -> WeightVersion:
        """Open a published version and check its bytes against its manifest; PublishError if either is wrong."""
        folder = self.folder(version)
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            weights = WeightVersion(int(manifest["weight_version"]), str(manifest["weight_digest"]), folder)
            check_weight_digest(folder, weights.digest)
        except FileNotFoundError:
            raise PublishError(f"weight version {version} is not in {self.root}") from None
        except (ValueError, KeyError, TypeError, ModelError, WeightDigestError) as error:
            raise PublishError(f"weight version {version} cannot be used: {error}") from None
        if weights.version != version:
            raise PublishError(f"{folder} says that it is version {weights.version}")
        return weights

    def prune(self, newest: int, oldest_needed: int, keep: int | None = None) -> None:
        """Remove versions that are neither among the newest `keep` (default: the store's) nor needed by the auditor."""
        for folder in self.root.iterdir():
            if not _IS_VERSION.fullmatch(folder.name):
                continue
            version = int(folder.name[1:])
            if version <= newest - (keep or self.keep) and version < oldest_needed:
                shutil.rmtree(folder)

    def folder(self, version: int) -> Path:
        """Where a version is or would be."""
        return self.root / f"v{version:06d}"


def confirm(weights: WeightVersion, engine: str, digest: str) -> None:
    """Raise PublishError unless `engine` holds the weights that were published."""
    if digest != weights.digest:
        raise PublishError(
            f"{engine} holds weights {digest} after loading version {weights.version}; {weights.digest} was published"
        )


def _copy_model(model: Path, folder: Path) -> str:
    for file in [model / "config.json", *sorted(model.glob("*.safetensors"))]:
        shutil.copyfile(file, folder / file.name)
    return weight_digest(model)


def _disk_error(error: OSError, version: int, root: Path) -> PublishError:
    if error.errno != errno.ENOSPC:
        return PublishError(f"weight version {version} could not be written to {root}: {error}")
    free = shutil.disk_usage(root).free // 2**20
    return PublishError(
        f"disk full: weight version {version} does not fit into {root} ({free} MiB free); "
        f"free some space or lower weights.keep"
    )
