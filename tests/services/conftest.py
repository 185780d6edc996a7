"""Real engines on a tiny model in this process, and a real auditor beside it."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rl_kernel.contracts import model_contract
from services.audit_sink import AuditTarget
from services.auditor_access import AuditorAccess
from services.config import Config, build_config
from services.loop import requests, score
from services.records import Batch, Rollout, WeightVersion
from services.referee import OwnAuditor
from services.rollout.actor import RolloutActor
from services.tasks.tokens import LowTokens
from services.trainer.actor import TrainerActor
from services.verdicts import AuditorApi, Verdicts
from services.weights import WeightStore
from tests.models import write_tiny_model

SAMPLES = 6


@dataclass
class Bench:
    """One model, both engines, and the auditor's address. A test makes actors of its own around the engines."""

    config: Config
    model: Path
    folder: Path
    rollout_engine: object
    trainer_engine: object
    auditor: OwnAuditor
    address: AuditorAccess
    store: WeightStore
    first: WeightVersion
    task: LowTokens
    runs: list = field(default_factory=list)

    def open(self, wrap_rollout=lambda engine: engine, wrap_trainer=lambda engine: engine) -> "Scene":
        """A new run: both actors, holding the first weights. wrap_*: puts something between engine and actor."""
        run_id = f"run-{len(self.runs)}"
        target = AuditTarget(
            access=self.address,
            run_id=run_id,
            spool=self.folder / "spool" / run_id,
            contract=model_contract("portable", segments=1),
        )
        scene = Scene(
            self,
            run_id,
            RolloutActor(lambda: wrap_rollout(self.rollout_engine), target),
            TrainerActor(lambda: wrap_trainer(self.trainer_engine), target),
        )
        scene.rollout.load(self.first)
        scene.trainer.load(self.first)
        self.runs.append(scene)
        return scene


@dataclass
class Scene:
    """One run on the bench."""

    bench: Bench
    run_id: str
    rollout: RolloutActor
    trainer: TrainerActor

    def sample(self, step: int = 0) -> tuple[Rollout, ...]:
        """Draw the responses of a step."""
        prompts = self.bench.task.prompts(step, self.bench.config.task.prompts_per_step)
        return self.rollout.generate(step, requests(self.bench.config, self.bench.task, step, prompts))

    def batch(self, step: int = 0) -> Batch:
        """Draw and score the responses of a step."""
        prompts = self.bench.task.prompts(step, self.bench.config.task.prompts_per_step)
        return score(self.bench.config, self.bench.task, step, self.bench.first, prompts, self.sample(step))

    def verdicts(self, samples: int = SAMPLES, seconds: float = 60.0) -> Verdicts:
        """What the auditor says once it is done."""
        self.rollout.flush(seconds)
        self.trainer.flush(seconds)
        verdicts = AuditorApi(self.bench.address, self.run_id).settle(samples, seconds)
        assert verdicts is not None, "the auditor does not answer"
        return verdicts


@pytest.fixture
def make_disk(tmp_path):
    """size → a folder that is a file system of its own, of that size."""
    made = []

    def make(size: str) -> Path:
        folder = tmp_path / f"disk-{len(made)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Strict vLLM and strict Megatron-core, each with one thread, and an auditor that recomputes everything."""
    from rl_kernel.integrations.megatron.parallel import leave_tensor_parallel
    from services.rollout.engine import EngineOptions, RolloutEngine
    from services.trainer.engine import TrainerEngine, TrainerOptions

    folder = tmp_path_factory.mktemp("bench")
    model = write_tiny_model(folder / "model")
    config = build_config(
        {
            "model": {"path": str(model)},
            "task": {"name": "tokens", "prompts_per_step": 2, "samples_per_prompt": 3},
            "rollout": {"max_new_tokens": 5, "max_model_len": 64, "kv_cache_mb": 16, "temperature": 0.7},
            "numerics": {"threads": 1},
        }
    )
    store = WeightStore(folder / "weights", keep=3)
    first = store.import_model(1, model)
    arguments = ["--ledger", str(folder / "ledger.sqlite"), "--weights-root", str(store.root), "--recompute-rate", "1"]
    rollout = RolloutEngine(model, EngineOptions.of(config))
    trainer = TrainerEngine(model, TrainerOptions.of(config))
    auditor = OwnAuditor(folder / "auditor", arguments, 0, 0, restart=False)
    address = auditor.start()
    bench = Bench(config, model, folder, rollout, trainer, auditor, address, store, first, LowTokens.of_model(model, 1))
    yield bench
    for scene in bench.runs:
        scene.rollout.close()
        scene.trainer.close()
    rollout.close()
    leave_tensor_parallel()
    auditor.stop()
