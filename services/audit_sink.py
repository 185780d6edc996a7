"""What each engine says about itself and its samples, on its way to the auditor.

One sink in each actor, so that the two sides report on their own: the trainer's record holds the tokens, cut and mask
that the trainer worked with, not a copy of the rollout's. `put_*` never wait; what could not be delivered is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from auditor.client import AuditClient, Counts
from auditor.records import Environment, Layout, Positions, RolloutRecord, TrainerRecord
from auditor.records import Sampling as AuditedSampling
from rl_kernel.contract import ModelContract
from services.auditor_access import AuditorAccess
from services.engines import NATIVE, EngineFacts
from services.records import Batch, Logprobs, Rollout, Sample, Sampling, WeightVersion

UNKNOWN_WEIGHTS = WeightVersion(-1, "", Path())


@dataclass(frozen=True, slots=True)
class AuditTarget:
    """Where records go. run_id: of the run. spool: a folder for each side's own waiting records is made in it.

    contract: what the run is measured against. A native engine follows none; its records name this one all the same,
    so that the auditor can say how far each side is from it instead of declining to compare.
    """

    access: AuditorAccess
    run_id: str
    spool: Path
    contract: ModelContract
    queue_size: int = 4096


class AuditSink:
    """Records of one engine → the auditor."""

    def __init__(self, target: AuditTarget, facts: EngineFacts) -> None:
        self._client = AuditClient(
            target.access.grpc,
            target.run_id,
            spool_dir=target.spool / facts.engine_id,
            queue_size=target.queue_size,
            token=target.access.token,
            credentials=target.access.credentials(),
        )
        self._run_id = target.run_id
        self._facts = facts if facts.contract_digest != NATIVE else _measured_against(target.contract, facts)

    def put_rollouts(self, step: int, rollouts: Sequence[Rollout], weights: WeightVersion) -> None:
        """Report what was sampled. weights: the version that the engine loaded, with the digest of its own memory."""
        for rollout in rollouts:
            self._client.submit_rollout(rollout_record(self._run_id, step, rollout, weights, self._facts))

    def put_training(
        self,
        batch: Batch,
        logprobs: Sequence[Logprobs],
        weights: WeightVersion,
        layers: Sequence[tuple[str, ...]] = (),
    ) -> None:
        """Report the first forward on a batch. weights: as above, UNKNOWN_WEIGHTS if they changed unannounced.

        layers: of each sample the digests of its layers' outputs; empty where none were asked for.
        """
        for i, (sample, values) in enumerate(zip(batch.samples, logprobs, strict=True)):
            record = trainer_record(self._run_id, batch.step, sample, values, weights, self._facts)
            if layers:
                record = replace(record, layer_digests=layers[i])
            self._client.submit_trainer(record)

    def flush(self, timeout: float) -> Counts:
        """Wait up to `timeout` seconds until nothing waits, in memory or on disk."""
        return self._client.flush(timeout)

    def close(self) -> Counts:
        """Flush, stop, and say what the auditor did not get."""
        return self._client.close()


def rollout_record(run_id: str, step: int, it: Rollout, weights: WeightVersion, facts: EngineFacts) -> RolloutRecord:
    """The rollout engine's side of a sample."""
    return RolloutRecord(
        run_id=run_id,
        step=step,
        sample_id=it.sample_id,
        engine_id=facts.engine_id,
        tokens=np.asarray(it.prompt + it.response, np.uint32),
        prompt_len=len(it.prompt),
        logprobs=it.logprobs,
        mask=np.ones(len(it.response), np.bool_),
        sampling=_sampling(it.sampling, facts),
        weight_version=weights.version,
        weight_digest=weights.digest,
        contract_digest=facts.contract_digest,
        environment=_environment(facts),
        layout=_layout(facts),
        positions=Positions(rope_digest=facts.rope_digest),
        finish_reason=it.finish_reason,
    )


def trainer_record(
    run_id: str, step: int, sample: Sample, logprobs: Logprobs, weights: WeightVersion, facts: EngineFacts
) -> TrainerRecord:
    """The trainer's side of a sample: the tokens, cut, mask and temperature that it was given, and its own weights."""
    it = sample.rollout
    tokens = np.asarray(it.prompt + it.response, np.uint32)
    return TrainerRecord(
        run_id=run_id,
        step=step,
        sample_id=it.sample_id,
        trainer_id=facts.engine_id,
        token_count=len(tokens),
        tokens=tokens,
        prompt_len=len(it.prompt),
        logprobs=logprobs,
        mask=np.asarray(sample.mask, np.bool_),
        sampling=_sampling(it.sampling, facts),
        weight_version=weights.version,
        weight_digest=weights.digest,
        contract_digest=facts.contract_digest,
        environment=_environment(facts),
        layout=_layout(facts),
        positions=Positions(rope_digest=facts.rope_digest),
    )


def _measured_against(contract: ModelContract, facts: EngineFacts) -> EngineFacts:
    environment = replace(facts.environment, mma=contract.profile.mma)
    return replace(facts, contract_digest=contract.digest(), environment=environment)


def _sampling(sampling: Sampling, facts: EngineFacts) -> AuditedSampling:
    return AuditedSampling(temperature=sampling.temperature, seed=sampling.seed, logprobs_mode=facts.logprobs_mode)


def _environment(facts: EngineFacts) -> Environment:
    it = facts.environment
    versions = tuple(f"{package} {version}" for package, version in it.versions)
    return Environment(arch=it.arch, mma=it.mma, digest=it.digest(), versions=versions)


def _layout(facts: EngineFacts) -> Layout:
    return Layout(
        tp_size=facts.tp_size,
        cp_size=facts.cp_size,
        vocab_size=facts.vocab_size,
        padded_vocab_size=facts.padded_vocab_size,
        vocab_shards=facts.vocab_shards,
    )
