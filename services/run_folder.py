"""The folder of one run, and what a run needs to go on from where it was.

runs/<id>/config.yaml  steps.jsonl  summary.json  plot.png
          weights/  checkpoints/  ledger.sqlite  auditor/  spool/  logs/
runs/latest -> <id>
"""

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from services.config import Config
from services.errors import CheckpointError
from services.step_log import StepLog


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a run stood. folder: what the trainer wrote. next_step: the first step that is not in it."""

    folder: Path
    next_step: int
    weight_version: int
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
        for attempt in range(100):
            folder = cls(root / (f"{run_id}-{attempt}" if attempt else run_id))
            try:
                folder.path.mkdir()
                break
            except FileExistsError:
                continue
        (folder.path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        return folder

    @classmethod
    def open(cls, name: str, root: Path) -> "RunFolder":
        """Find an existing run by its folder or its id; CheckpointError if there is none."""
        for path in (Path(name), root / name):
            if (path / "config.yaml").is_file():
                return cls(path.resolve())
        runs = sorted(p.name for p in root.glob("*/") if (p / "checkpoints").is_dir() and not p.is_symlink())
        raise CheckpointError(f"no run {name!r} in {root}; runs with checkpoints: {', '.join(runs[-5:]) or 'none'}")

    @property
    def run_id(self) -> str:
        """The name that the auditor knows the run by."""
        return self.path.name

    @property
    def config_file(self) -> Path:
        """The config that the run was started with."""
        return self.path / "config.yaml"

    @property
    def step_log(self) -> StepLog:
        """What became of each step."""
        return StepLog(self.path / "steps.jsonl")

    def point_latest(self) -> None:
        """Make `latest` beside the run point at it, in one rename."""
        link, draft = self.path.parent / "latest", self.path.parent / f".latest-{os.getpid()}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(self.path.name)
        draft.rename(link)

    def begin_checkpoint(self, next_step: int) -> Path:
        """An empty scratch folder for the trainer to write into."""
        scratch = self.path / "checkpoints" / f".step{next_step:06d}.partial"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        return scratch

    def finish_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """Give a written scratch folder its name, and remove the checkpoints before it."""
        final = self.path / "checkpoints" / f"step{checkpoint.next_step:06d}"
        state = {k: v for k, v in asdict(checkpoint).items() if k != "folder"}
        (checkpoint.folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        checkpoint.folder.rename(final)
        for older in (self.path / "checkpoints").glob("step*"):
            if older.name < final.name:
                shutil.rmtree(older)
        return Checkpoint(final, checkpoint.next_step, checkpoint.weight_version, checkpoint.weight_digest)

    def newest_checkpoint(self) -> Checkpoint:
        """The newest complete checkpoint; CheckpointError if there is none or it cannot be read."""
        folders = sorted((self.path / "checkpoints").glob("step*"))
        if not folders:
            raise CheckpointError(f"run {self.run_id} has no checkpoint; set run.checkpoint_every to write some")
        try:
            state = json.loads((folders[-1] / "state.json").read_text())
            return Checkpoint(folders[-1], **state)
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"checkpoint {folders[-1]} cannot be read: {error}") from None
