"""The folder of one run, and what a run needs to go on from where it was.

runs/<id>/run_id  config.yaml  steps.jsonl  under_way.json  summary.json  plot.png  .lock
          weights/  checkpoints/  ledger.sqlite  auditor/  spool/  logs/
runs/latest -> <id>

A folder may be moved, renamed or copied: the run keeps the id that it was started with, by which the auditor knows it.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from services.config import Config, load_config
from services.durable import naming, replace_text, sync, sync_folder
from services.errors import CheckpointError, ConfigError
from services.lock import held
from services.redo import UnderWay
from services.step_log import StepLog
from services.stored import Stored
from services.yaml_tree import write_yaml

_NAMES = 100
_STATE = "state.json"
_IS_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PATHS = (
    *("run.directory", "model.cache", "weights.directory"),
    *("auditor.token_file", "auditor.tls_ca", "auditor.tls_certificate", "auditor.tls_key"),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a run stood. folder: what the trainer wrote. next_step: the first step that is not in it."""

    folder: Path
    next_step: int
    weight_version: int
    weight_digest: str


class _State(Stored):
    next_step: int = Field(ge=0)
    weight_version: int = Field(ge=0)
    weight_digest: str


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names and places; nothing here is kept open."""

    path: Path

    @classmethod
    def create(cls, config: Config) -> "RunFolder":
        """Make the folder of a new run and write its config."""
        root = Path(config.run.directory).resolve()
        root.mkdir(parents=True, exist_ok=True)
        name = f"{config.run.name}." if config.run.name else ""
        run_id = f"{name}{time.strftime('%Y%m%d-%H%M%S')}-{config.numerics.mode}"
        for attempt in range(_NAMES):
            folder = cls(root / (f"{run_id}-{attempt}" if attempt else run_id))
            try:
                folder.path.mkdir()
            except FileExistsError:
                continue
            replace_text(folder.path / "run_id", folder.path.name + "\n")
            folder.keep_config(config)
            sync(root)
            return folder
        raise ConfigError(
            f"run.directory = {str(root)!r} has {run_id} and {_NAMES - 1} more of that second; set run.name to another"
        )

    @classmethod
    def open(cls, name: str, root: Path) -> "RunFolder":
        """Find an existing run by its folder or its id; CheckpointError if there is none."""
        for path in (Path(name), root / name):
            if (path / "config.yaml").is_file():
                folder = cls(path.resolve())
                if not _IS_RUN_ID.fullmatch(folder.run_id):
                    raise CheckpointError(f"{folder.path / 'run_id'} holds {folder.run_id[:80]!r}, which is no run id")
                return folder
        runs = sorted(p.name for p in root.glob("*/") if (p / "checkpoints").is_dir() and not p.is_symlink())
        raise CheckpointError(f"no run {name!r} in {root}; runs with checkpoints: {', '.join(runs[-5:]) or 'none'}")

    @property
    def run_id(self) -> str:
        """The name that the auditor knows the run by: that of the folder where the run was started."""
        try:
            return (self.path / "run_id").read_text(encoding="utf-8", errors="replace").rstrip("\n")
        except FileNotFoundError:
            return self.path.name

    @property
    def config_file(self) -> Path:
        """The config that the run was started with, or last resumed with."""
        return self.path / "config.yaml"

    def keep_config(self, config: Config) -> None:
        """Write it for those who go on with the run, from any folder; to the last step that was ever asked for."""
        if self.config_file.exists():
            steps = max(config.run.steps, load_config(self.config_file).run.steps)
            config = config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})
        tree = with_absolute_paths(config).model_dump(mode="json")
        replace_text(self.config_file, write_yaml(tree))

    def lock(self) -> AbstractContextManager[None]:
        """Hold the folder for this process; CheckpointError if another one does."""
        return held(self.path / ".lock", f"run {self.run_id}", self.path)

    @property
    def step_log(self) -> StepLog:
        """What became of each step."""
        return StepLog(self.path / "steps.jsonl")

    @property
    def under_way(self) -> UnderWay | None:
        """The last step that was begun, and under what; None before the first. CheckpointError if it is unreadable."""
        file = self.path / "under_way.json"
        return UnderWay.read(file) if file.exists() else None

    def begin_step(self, under_way: UnderWay) -> None:
        """Note that records of this step may be with the auditor from now on."""
        replace_text(self.path / "under_way.json", under_way.text())

    def point_latest(self) -> None:
        """Make `latest` beside the run point at it, in one rename."""
        link, draft = self.path.parent / "latest", self.path.parent / f".latest-{os.getpid()}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(self.path.name)
        draft.rename(link)

    @contextmanager
    def checkpoint(self, next_step: int) -> Iterator[Path]:
        """An empty scratch folder for the trainer to write into; gone after the block, unless it was finished."""
        folder = self.path / "checkpoints"
        for left in folder.glob(".*.partial"):  # by a process that was killed
            shutil.rmtree(left)
        scratch = folder / f".{_name_of(next_step)}.partial"
        scratch.mkdir(parents=True)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def finish_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """Give a written scratch folder its name, and remove the checkpoints before it."""
        folder = self.path / "checkpoints"
        final = folder / _name_of(checkpoint.next_step)
        state = _State(
            next_step=checkpoint.next_step,
            weight_version=checkpoint.weight_version,
            weight_digest=checkpoint.weight_digest,
        )
        with naming(checkpoint.folder):
            (checkpoint.folder / _STATE).write_text(state.text())
            sync_folder(checkpoint.folder)
        shutil.rmtree(final, ignore_errors=True)
        checkpoint.folder.rename(final)
        sync(folder)
        sync(self.path)
        for older in folder.glob("step*"):
            if older.name < final.name:
                shutil.rmtree(older)
        return Checkpoint(final, checkpoint.next_step, checkpoint.weight_version, checkpoint.weight_digest)

    def newest_checkpoint(self) -> Checkpoint:
        """The newest complete checkpoint; CheckpointError if there is none or it cannot be read."""
        folders = sorted((self.path / "checkpoints").glob("step*"))
        if not folders:
            raise CheckpointError(
                f"run {self.run_id} has no checkpoint: it ended before the first, which comes after "
                f"run.checkpoint_every steps if that is not 0; start a new run"
            )
        state = _State.read(folders[-1] / _STATE)
        if folders[-1].name != _name_of(state.next_step):
            raise CheckpointError(f"{folders[-1] / _STATE} says that it is of step {state.next_step}; it is damaged")
        return Checkpoint(folders[-1], state.next_step, state.weight_version, state.weight_digest)


def with_absolute_paths(config: Config) -> Config:
    """The same config, as it reads from any folder. A packaged model's name is none of a folder, and stays."""
    keys = [*_PATHS, *(["model.path"] if (Path(config.model.path) / "config.json").is_file() else [])]
    for key in keys:
        section, name = key.split(".")
        part = getattr(config, section)
        if path := getattr(part, name):
            changed = part.model_copy(update={name: str(Path(path).absolute())})
            config = config.model_copy(update={section: changed})
    return config


def _name_of(next_step: int) -> str:
    return f"step{next_step:06d}"
