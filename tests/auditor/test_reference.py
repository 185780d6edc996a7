"""The reference in its own process: right bits, right side, and one clear code where it cannot be asked."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.client import AuditClient
from auditor.judge import (
    UNDIAGNOSED,
    Faulty,
    Reference,
    ReferenceLogprobs,
    Verdict,
    judge_pair,
    judge_with_reference,
)
from auditor.records import Environment, Layout, Positions, RolloutRecord, Sampling, TrainerRecord
from rl_kernel.contracts import model_contract
from rl_kernel.reference.model import Decoder
from tests.auditor.processes import running_auditor
from tests.auditor.samples import CONTRACT, CONTRACTS, ENVIRONMENT, one_ulp_off
from tests.models import LLAMA, write_tiny_model


@pytest.fixture(scope="module")
def weights_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_versions(tmp_path_factory.mktemp("weights"))


def write_versions(root: Path) -> Path:
    """Versions 1 and 2 of a tiny model, as a job publishes them."""
    for version in (1, 2):
        folder = write_tiny_model(root / f"v{version:06d}", LLAMA, seed=version)
        digest = Decoder.open(folder, CONTRACT).weight_digest
        (folder / "manifest.json").write_text(json.dumps({"weight_version": version, "weight_digest": digest}))
    return root


def true_pair(
    root: Path, sample_id: str, version: int = 1, temperature: float = 1.0
) -> tuple[RolloutRecord, TrainerRecord]:
    """Both sides exactly as the contract has it."""
    decoder = Decoder.open(root / f"v{version:06d}", CONTRACT)
    tokens = np.random.default_rng([*sample_id.encode()]).integers(0, LLAMA.vocab, 40).astype(np.uint32)
    (logprobs,) = decoder.logprobs([tokens.astype(np.int64)], [8], temperature)
    common: dict[str, Any] = {
        "run_id": "run",
        "step": 0,
        "sample_id": sample_id,
        "prompt_len": 8,
        "logprobs": logprobs,
        "mask": np.ones(32, np.bool_),
        "sampling": Sampling(temperature=temperature, seed=1),
        "weight_version": version,
        "weight_digest": decoder.weight_digest,
        "contract_digest": CONTRACT.digest(),
        "environment": ENVIRONMENT,
        "layout": Layout(1, 1, LLAMA.vocab, 384, (0, 384)),
        "positions": Positions(decoder.config.rope_digest),
    }
    return (
        RolloutRecord(engine_id="r", tokens=tokens, **common),
        TrainerRecord(trainer_id="t", token_count=40, tokens=tokens, **common),
    )


def both(pair: tuple[RolloutRecord, TrainerRecord], **change: Any) -> tuple[RolloutRecord, TrainerRecord]:
    return replace(pair[0], **change), replace(pair[1], **change)


def test_the_side_that_left_the_contract_is_named(weights_root: Path, tmp_path: Path) -> None:
    cases = {
        name: true_pair(weights_root, name, temperature=0.8)
        for name in ("none", "rollout", "trainer", "both", "agreed")
    }
    cases["rollout"] = (one_ulp_off(cases["rollout"][0]), cases["rollout"][1])
    cases["trainer"] = (cases["trainer"][0], one_ulp_off(cases["trainer"][1]))
    cases["both"] = (one_ulp_off(cases["both"][0], 3), one_ulp_off(cases["both"][1], 4))
    cases["agreed"] = (one_ulp_off(cases["agreed"][0]), one_ulp_off(cases["agreed"][1]))
    flags = ("--weights-root", str(weights_root), "--recompute-rate", "1")
    with (
        running_auditor(tmp_path, *flags) as auditor,
        AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client,
    ):
        for rollout, trainer in cases.values():
            client.submit_rollout(rollout)
            client.submit_trainer(trainer)
        client.flush(10)
        run = auditor.wait_for("/api/v1/runs/run", lambda r: r["queued"] == 0 and r["samples"] == 5)
        sides = {name: auditor.get(f"/api/v1/runs/run/samples/0/{name}") for name in cases}
        assert {name: found["judgement"]["side"] for name, found in sides.items()} == {
            **{n: n for n in cases},
            "agreed": "both",
        }
        assert sides["none"]["reference_bits"] == sides["none"]["rollout"]["bits"]
        assert run["by_side"] == {"rollout": 1, "trainer": 1, "both": 2}
        assert run["by_verdict"] == {"match": 1, "mismatch": 4}
        assert (run["rollout_mismatched"], run["trainer_mismatched"], run["recomputed_mismatched"]) == (3, 3, 5)
        assert auditor.metrics()['auditor_recomputed_tokens_total{mma="fma32",run_id="run"}'] == 160


def test_a_trainer_that_reports_the_rollouts_own_values_is_found_where_it_is_recomputed(weights_root: Path) -> None:
    """Blind spot: with reuse of rollout logprobs the difference is 0 by construction, whatever the rollout did."""
    stale, _ = true_pair(weights_root, "a", version=2)
    rollout, trainer = both(true_pair(weights_root, "a"), logprobs=stale.logprobs)
    judged = judge_pair(rollout, trainer, CONTRACTS)
    assert (judged.judgement.verdict, judged.judgement.differing, judged.drift.max_abs) == (Verdict.MATCH, 0, 0.0)
    assert judged.judgement.reference is Reference.NOT_ASKED, "a match that nobody recomputed says no more than it is"
    truth = true_pair(weights_root, "a")[0].logprobs
    asked = judge_with_reference(judged.judgement, rollout, trainer, ReferenceLogprobs(truth, truth, "fma32"))
    assert (asked.verdict, asked.side, asked.cause) == (Verdict.MISMATCH, Faulty.BOTH, UNDIAGNOSED)
    assert asked.reference_differing == asked.rollout_differing == asked.trainer_differing > 16
    assert (asked.differing, asked.max_abs) == (0, 0.0), "of the sides from each other"


def under(profile: str, root: Path, record: Any) -> Any:
    """A record whose side ran on another machine: its values are those of that machine's matrix instruction."""
    contract = model_contract(profile, segments=2)
    tokens = true_pair(root, record.sample_id)[0].tokens.astype(np.int64)
    (values,) = Decoder.open(root / "v000001", contract).logprobs([tokens], [8], 1.0)
    environment = Environment(f"gpu-{profile}", contract.profile.mma, f"{profile:_<64}".encode().hex()[:64])
    return replace(record, logprobs=values, contract_digest=contract.digest(), environment=environment)


@pytest.mark.parametrize(
    ("of_rollout", "of_trainer", "models"),
    [("sm90", "portable", "sm90,fma32"), ("sm90_poly", "cdna3", "sm90,cdna3"), ("cdna3", "sm90_poly", "cdna3,sm90")],
)
def test_two_sides_of_two_makers_are_explained_where_each_keeps_to_its_own_arithmetic(
    weights_root: Path, tmp_path: Path, of_rollout: str, of_trainer: str, models: str
) -> None:
    """Both machines' instructions are followed here, on a CPU."""
    flags = ("--weights-root", str(weights_root), "--recompute-rate", "1")
    with (
        running_auditor(tmp_path, *flags) as auditor,
        AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client,
    ):
        for name, off in (("kept", False), ("left", True)):
            plain = true_pair(weights_root, name)
            rollout = under(of_rollout, weights_root, plain[0])
            trainer = under(of_trainer, weights_root, plain[1]) if of_trainer != "portable" else plain[1]
            assert rollout.logprobs.tobytes() != trainer.logprobs.tobytes()
            client.submit_rollout(one_ulp_off(rollout) if off else rollout)
            client.submit_trainer(trainer)
        client.flush(10)
        run = auditor.wait_for("/api/v1/runs/run", lambda r: r["queued"] == 0 and r["samples"] == 2)
        kept, left = (auditor.get(f"/api/v1/runs/run/samples/0/{name}")["judgement"] for name in ("kept", "left"))
        assert (kept["explained_by_arithmetic"], kept["side"], kept["reference_mma"]) == (True, "none", models)
        assert (left["explained_by_arithmetic"], left["side"]) == (False, "rollout")
        assert run["explained_tokens"] > 0
        assert auditor.metrics()['auditor_mismatched_tokens_total{run_id="run",side="pair"}'] == 0
        counted = 'auditor_mismatched_samples_total{cause="arithmetic",run_id="run",side="none"}'
        assert auditor.metrics()[counted] == 1, "no cause is unknown where none is needed"


def settled(run: dict[str, Any]) -> bool:
    """Whether every sample has its verdict, and every search for causes is over."""
    return run["queued"] == 0 and "searching" not in run["by_cause"]


def test_stale_weights_are_found_with_the_version_and_only_a_few_samples_of_a_step_are_looked_into(
    weights_root: Path, tmp_path: Path
) -> None:
    flags = ("--weights-root", str(weights_root), "--diagnose-per-step", "2", "--recompute-rate", "0")
    with (
        running_auditor(tmp_path, *flags) as auditor,
        AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client,
    ):
        for i in range(4):
            stale, fresh = true_pair(weights_root, f"{i}", version=1), true_pair(weights_root, f"{i}", version=2)
            client.submit_rollout(replace(fresh[0], logprobs=stale[0].logprobs))
            client.submit_trainer(fresh[1])
        client.flush(10)
        run = auditor.wait_for("/api/v1/runs/run", lambda r: r["samples"] == 4 and settled(r))
        assert run["by_side"] == {"rollout": 4}
        assert run["by_cause"] == {"stale_weights": 2, "undiagnosed": 2}
        found = [auditor.get(f"/api/v1/runs/run/samples/0/{i}")["judgement"] for i in range(4)]
        (first,) = [judgement["causes"][0] for judgement in found if judgement["causes"]][:1]
        assert first["score"] == 1.0
        assert "weight version 1, the first one, where 2 is stated" in first["evidence"]
        assert (
            auditor.metrics()['auditor_mismatched_samples_total{cause="stale_weights",run_id="run",side="rollout"}']
            == 2
        )


def test_what_the_reference_cannot_be_asked_has_a_code(weights_root: Path, tmp_path: Path) -> None:
    sampling = Sampling(seed=1)
    cases = {
        "weights_missing": both(true_pair(weights_root, "a"), weight_version=7, weight_digest="ab" * 32),
        "weights_digest": both(true_pair(weights_root, "b"), weight_digest="ab" * 32),
        "rope_differs": both(true_pair(weights_root, "c"), positions=Positions("cd" * 32)),
        "sampling_unsupported": both(true_pair(weights_root, "d"), sampling=replace(sampling, top_p=0.9)),
        "positions_unsupported": both(true_pair(weights_root, "e"), positions=Positions("cd" * 32, attention="full")),
    }
    flags = ("--weights-root", str(weights_root), "--recompute-rate", "1")
    with (
        running_auditor(tmp_path, *flags) as auditor,
        AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client,
    ):
        for rollout, trainer in cases.values():
            client.submit_rollout(rollout)
            client.submit_trainer(trainer)
        client.flush(10)
        run = auditor.wait_for("/api/v1/runs/run", lambda r: r["queued"] == 0 and r["samples"] == len(cases))
        assert run["by_reference"] == {"failed": len(cases)}
        assert run["by_verdict"] == {"match": len(cases)}, "that the two sides agree stays true"
        metrics = auditor.metrics()
        for code, (rollout, _) in cases.items():
            assert metrics[f'auditor_recompute_errors_total{{code="{code}",run_id="run"}}'] == 1
            found = auditor.get(f"/api/v1/runs/run/samples/0/{rollout.sample_id}")
            assert found["judgement"]["reference_error"].startswith(f"{code}: ")


def test_queued_samples_are_taken_up_after_a_kill(weights_root: Path, tmp_path: Path) -> None:
    """Stored without a reference, killed, started with one: what was not queued stays, what was is recomputed once."""
    flags = ("--weights-root", str(weights_root), "--recompute-rate", "1")
    with (
        running_auditor(tmp_path, *flags) as auditor,
        AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client,
    ):
        for i in range(12):
            rollout, trainer = true_pair(weights_root, f"{i}", version=1 + i % 2)
            client.submit_rollout(rollout)
            client.submit_trainer(trainer)
        assert client.flush(10).accepted == 24
        auditor.kill()
        auditor.start()
        run = auditor.wait_for("/api/v1/runs/run", lambda r: r["queued"] == 0)
        assert run["by_reference"] == {"done": 12}
        assert run["recomputed_mismatched"] == 0
        assert auditor.metrics()['auditor_recomputed_tokens_total{mma="fma32",run_id="run"}'] == 12 * 32


def test_other_contracts_are_refused_by_name(weights_root: Path) -> None:
    from auditor.errors import RecomputeError
    from auditor.recompute_worker import Models
    from auditor.weights_place import LocalWeights

    models = Models(LocalWeights(weights_root))
    digest = Decoder.open(weights_root / "v000002", CONTRACT).weight_digest
    with pytest.raises(RecomputeError, match="no contract has the digest"):
        models.get(2, digest, "00" * 32)
    elsewhere = models.get(99, digest, model_contract("portable", segments=4).digest())
    assert elsewhere.weight_digest == digest, "found by its manifest where the folder has another name"
