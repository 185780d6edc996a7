"""A job of few steps in this process: real engines, actors, loop and client. Faults take hold of its parts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rl_kernel.contracts import model_contract
from rl_kernel.integrations.megatron.parallel import leave_tensor_parallel
from rl_kernel.reference.config import DecoderConfig
from services.audit_sink import AuditTarget
from services.auditor_access import AuditorAccess
from services.config import Config, build_config
from services.faults.prompts import CommonBeginning
from services.loop import Parts, rl_step
from services.records import WeightVersion
from services.rollout import engine as rollout_engine
from services.rollout.actor import RolloutActor
from services.rollout.engine import EngineOptions, RolloutEngine
from services.trainer.actor import TrainerActor
from services.trainer.engine import TrainerEngine, TrainerOptions
from services.weights import WeightStore, confirm

RESPONSE: Final = 72
TEMPERATURE: Final = 0.7
_GROUP: Final = 2


class _LocalTrainer(TrainerActor):
    """A trainer's only rank, which publishes by itself."""

    def publish(self, store: WeightStore, version: int) -> WeightVersion:
        """Write the weights into `store` as `version`, and count from now on as holding that version."""
        final = store.folder(version)
        return store.publish(version, lambda scratch: self.export(version, scratch, final))


class SmallJob:
    """One run. weights: those that the next step samples from; rollout, trainer: actors around the two engines.

    Engines are strict and prove themselves, until a fault takes hold of them.
    """

    def __init__(self, model: Path, access: AuditorAccess, folder: Path, run_id: str, each: int, rate: float) -> None:
        """folder: of the list; each: samples a step. rate: the learning rate."""
        self.model, self.run_id, self.at = model, run_id, 0
        self.config = _config(model, math.ceil(each / _GROUP), rate)
        self.task = CommonBeginning(DecoderConfig.read(model).vocab, seed=1)
        self.store = WeightStore(folder / "weights" / run_id, keep=1000)
        contract = model_contract("portable", segments=1)
        self._target = AuditTarget(access, run_id, folder / "spool" / run_id, contract)
        self.options = EngineOptions.of(self.config)
        self.rollout = RolloutActor(lambda: RolloutEngine(model, self.options), self._target)
        self.trainer = self._trainer("strict")
        self.first = self.weights = self.store.import_model(1, model)
        self._load()

    @property
    def rollout_engine(self) -> Any:
        """The side of vLLM, as it is now."""
        return self.rollout._engine

    @property
    def trainer_engine(self) -> Any:
        """The side of Megatron-core, as it is now."""
        return self.trainer._engine

    @property
    def samples(self) -> int:
        """Of each step."""
        return self.config.task.prompts_per_step * self.config.task.samples_per_prompt

    def step(self) -> None:
        """One step of the job's own loop."""
        parts = Parts(self.task, self.rollout, self.trainer, self.store)
        self.weights = rl_step(self.config, parts, self.at, self.weights).weights
        self.at += 1

    def restart_rollout(self, model: Path | None = None, more: dict[str, Any] | None = None, **options: Any) -> None:
        """The rollout's process begins anew with other options. model: another folder; more: arguments of vLLM's."""
        self.rollout.close()
        self.rollout_engine.close()
        self.options = replace(self.options, **options)
        ours: Any = vars(rollout_engine)["strict_vllm"]
        usual = ours.native_engine_arguments
        ours.native_engine_arguments = lambda **how: usual(**how) | (more or {})
        try:
            self.rollout = RolloutActor(lambda: RolloutEngine(model or self.model, self.options), self._target)
        finally:
            ours.native_engine_arguments = usual

    def restart_trainer(self, numerics: str) -> None:
        """The trainer's process begins anew, on these numerics."""
        self.trainer.close()
        self.trainer = self._trainer(numerics)
        self.trainer.load(self.weights)

    def flush(self, seconds: float) -> None:
        """Wait until every record is with the auditor."""
        self.rollout.flush(seconds)
        self.trainer.flush(seconds)

    def close(self) -> None:
        """Deliver what is left and take the engines down."""
        self.rollout.close()
        self.trainer.close()
        self.rollout_engine.close()
        leave_tensor_parallel()

    def _trainer(self, numerics: Any) -> _LocalTrainer:
        options = replace(TrainerOptions.of(self.config), numerics=numerics)
        return _LocalTrainer(lambda: TrainerEngine(self.model, options), self._target)

    def _load(self) -> None:
        confirm(self.weights, "the trainer", self.trainer.load(self.weights))
        confirm(self.weights, "the rollout engine", self.rollout.load(self.weights))


def _config(model: Path, prompts: int, rate: float) -> Config:
    return build_config(
        {
            "model": {"path": str(model)},
            "task": {"name": "tokens", "prompts_per_step": prompts, "samples_per_prompt": _GROUP},
            "rollout": {"max_new_tokens": RESPONSE, "max_model_len": 256, "temperature": TEMPERATURE},
            "trainer": {"learning_rate": rate, "updates_per_step": 2},
            "numerics": {"threads": 1},
            "auditor": {"layer_digests": True},
        }
    )
