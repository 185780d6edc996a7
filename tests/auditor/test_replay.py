"""From a mismatch in the ledger to the op that made it, through a file."""

import io
import subprocess
import sys
import urllib.request
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.capsule import Capsule, from_bytes, to_bytes
from auditor.client import AuditClient
from auditor.errors import RecordError
from auditor.faults.ops import HiddenKeys, ThreeParts, broken
from auditor.judge import judge_pair
from auditor.records import Positions, RolloutRecord, TrainerRecord
from auditor.replay.__main__ import main
from auditor.replay.report import Question, replay
from auditor.replay.watch import Watched
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Reference
from tests.auditor.processes import REPOSITORY, running_auditor
from tests.auditor.samples import CONTRACT, CONTRACTS, pair
from tests.auditor.test_reference import true_pair, weights_root

__all__ = ["weights_root"]


def in_three_parts(root: Path, sample_id: str) -> tuple[RolloutRecord, TrainerRecord]:
    """A sample whose trainer summed its products in three parts, and that differs: on every machine alike."""
    decoder = Decoder.open(root / "v000001", CONTRACT)
    in_parts = replace(decoder, reference=broken(ThreeParts, decoder.reference))
    rollout, trainer = true_pair(root, sample_id)
    (wrong,) = in_parts.logprobs([rollout.tokens.astype(np.int64)], [8], 1.0)
    assert wrong.tobytes() != rollout.logprobs.tobytes()
    return rollout, replace(trainer, logprobs=wrong)


def edge_sees_itself(reference: Reference) -> Reference:
    return broken(HiddenKeys, reference, edges=(20,), layers=2)


def test_a_capsule_holds_every_bit_and_is_the_same_file_each_time() -> None:
    rollout, trainer = pair()
    capsule = Capsule(rollout, trainer, judge_pair(rollout, trainer, CONTRACTS).judgement, rollout.logprobs)
    content = to_bytes(capsule)
    back = from_bytes(content)
    assert to_bytes(back) == content
    assert back.rollout.logprobs.tobytes() == rollout.logprobs.tobytes()
    assert back.judgement == capsule.judgement
    assert len(content) < 4096


def test_a_changed_capsule_is_refused() -> None:
    rollout, trainer = pair()
    content = to_bytes(Capsule(rollout, trainer, judge_pair(rollout, trainer, CONTRACTS).judgement, None))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["trainer.pb"] = parts["rollout.pb"]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    with pytest.raises(RecordError, match=r"trainer\.pb of the capsule is not the one that was frozen"):
        from_bytes(buffer.getvalue())
    with pytest.raises(RecordError, match="this is no capsule"):
        from_bytes(b"nothing of the kind")


def test_a_capsule_whose_reference_has_another_length_is_refused() -> None:
    rollout, trainer = pair()
    judgement = judge_pair(rollout, trainer, CONTRACTS).judgement
    with pytest.raises(RecordError, match=r"reference\.f32 of the capsule has 4 bytes, not 4 for each response token"):
        from_bytes(to_bytes(Capsule(rollout, trainer, judgement, rollout.logprobs[:1])))


def test_the_first_op_that_differs_on_equal_inputs_is_named_and_its_swap_removes_it(weights_root: Path) -> None:
    decoder = Decoder.open(weights_root / "v000001", CONTRACT)
    rollout, _ = true_pair(weights_root, "a")
    question = Question(decoder, rollout.tokens.astype(np.int64), 8, 1.0)
    (wrong, _) = question.run(edge_sees_itself(decoder.reference))
    found = replay(question, replace(rollout, logprobs=wrong), lambda: edge_sees_itself(decoder.reference))
    assert found.reproduced
    assert found.differing > 0
    assert found.call is not None
    assert (found.call.op, found.call.name) == ("attention", "layers.1.attention")
    assert found.swaps["attention"] == 0
    assert min(left for op, left in found.swaps.items() if op != "attention") > 0


def test_what_is_kept_of_a_run_is_digests_however_long_it_is_and_the_tensors_of_one_call(weights_root: Path) -> None:
    decoder = Decoder.open(weights_root / "v000001", CONTRACT)
    tokens = true_pair(weights_root, "a")[0].tokens.astype(np.int64)
    sizes = []
    for length in (12, 40):
        watched = Question(decoder, tokens[:length], 8, 1.0).run(decoder.reference)[1]
        assert watched.kept is None
        assert {len(digest) for call in watched.calls for digest in (call.inputs, call.output)} == {64}
        sizes.append(len(repr(watched.calls)))
    assert sizes[0] == sizes[1]
    asked = Question(decoder, tokens, 8, 1.0).run(Watched(decoder.reference, keep=3))[1]
    assert asked.kept is not None
    assert asked.kept.output.shape[0] == len(tokens)


def test_ops_that_keep_the_contract_show_no_difference(weights_root: Path) -> None:
    decoder = Decoder.open(weights_root / "v000001", CONTRACT)
    rollout, _ = true_pair(weights_root, "a")
    question = Question(decoder, rollout.tokens.astype(np.int64), 8, 1.0)
    found = replay(question, rollout, lambda: decoder.reference)
    assert (found.reproduced, found.differing, found.call, found.swaps) == (True, 0, None, {})


def test_a_mismatch_is_frozen_by_the_api_and_replayed_by_a_command(weights_root: Path, tmp_path: Path) -> None:
    rollout, trainer = in_three_parts(weights_root, "a")
    flags = ("--weights-root", str(weights_root))
    with running_auditor(tmp_path, *flags) as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client:
            client.submit_rollout(rollout)
            client.submit_trainer(trainer)
            client.flush(10)
        auditor.wait_for("/api/v1/runs/run", lambda r: r["by_side"] == {"trainer": 1})
        with urllib.request.urlopen(f"http://{auditor.http}/api/v1/runs/run/samples/0/a/capsule") as answer:
            by_api = answer.read()
        auditor.stop()
        out = tmp_path / "a.capsule"
        command = [sys.executable, "-m", "auditor.capsule", str(auditor.ledger), "run", "0", "a", "--out", str(out)]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    assert out.read_bytes() == by_api
    tensors = tmp_path / "call.npz"
    command = [sys.executable, "-m", "auditor.replay", str(out), "--weights-root", str(weights_root)]
    command += ["--trainer-ops", "auditor.faults.ops:ThreeParts", "--tensors", str(tensors)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "rollout: 0 of 32 reported values differ" in done.stdout
    assert "trainer: the ops auditor.faults.ops:ThreeParts reproduce the reported bits" in done.stdout
    assert "trainer: first to differ on equal inputs: gemm at layers." in done.stdout
    with np.load(tensors, allow_pickle=False) as kept:
        assert kept["output"].tobytes() != kept["expected"].tobytes()
        assert kept["input_0"].shape[0] == 40


def test_ops_that_do_not_exist_are_one_line(weights_root: Path, tmp_path: Path) -> None:
    rollout, trainer = in_three_parts(weights_root, "a")
    file = tmp_path / "c"
    file.write_bytes(to_bytes(Capsule(rollout, trainer, judge_pair(rollout, trainer, CONTRACTS).judgement, None)))
    command = [sys.executable, "-m", "auditor.replay", str(file), "--weights-root", str(weights_root)]
    for name in ("none:x", "os:path"):
        done = subprocess.run(
            [*command, "--rollout-ops", name], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert f"'{name}' cannot be loaded" in done.stderr


def frozen(folder: Path, rollout: RolloutRecord, trainer: TrainerRecord) -> list[str]:
    """Arguments of a replay that looks at the reported values only."""
    (folder / "c").write_bytes(
        to_bytes(Capsule(rollout, trainer, judge_pair(rollout, trainer, CONTRACTS).judgement, None))
    )
    return [str(folder / "c"), "--rollout-ops", "none", "--trainer-ops", "none"]


def test_sides_that_are_not_comparable_are_each_held_to_what_they_worked_on(
    weights_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout, _ = true_pair(weights_root, "a")
    _, trainer = true_pair(weights_root, "another text", version=2, temperature=0.5)
    trainer = replace(trainer, sample_id="a")
    assert main([*frozen(tmp_path, rollout, trainer), "--weights-root", str(weights_root)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rollout: 0 of 32 reported values differ from the reference",
        "trainer: 0 of 32 reported values differ from the reference",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_len": 0, "logprobs": np.zeros(40, np.float32), "mask": np.ones(40, np.bool_)}, "prompt_len 0 of 40"),
        ({"tokens": np.full(40, 331, np.uint32)}, "token id 331 is beyond the model's vocabulary of 331"),
        (
            {"positions": Positions("cd" * 32, offset=4)},
            "ops are replayed at positions 0, 1, …; the rollout's begin with [4, 5, 6]",
        ),
        ({"positions": Positions("cd" * 32)}, "the record names rotary parameters cdcd"),
    ],
)
def test_what_the_reference_cannot_follow_is_one_line(
    weights_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    rollout, trainer = true_pair(weights_root, "a")
    given = frozen(tmp_path, replace(rollout, **change), trainer)
    assert main([*given, "--weights-root", str(weights_root)]) == 2
    assert capsys.readouterr().err.startswith(f"replay: {said}")


def test_causes_are_searched_for_as_long_as_is_asked(
    weights_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout, trainer = true_pair(weights_root, "a")
    decoder = Decoder.open(weights_root / "v000001", CONTRACT)
    (hot,) = decoder.logprobs([rollout.tokens.astype(np.int64)], [8], 2.0)
    command = [*frozen(tmp_path, rollout, replace(trainer, logprobs=hot)), "--weights-root", str(weights_root)]
    assert main([*command, "--causes", "60"]) == 1
    assert capsys.readouterr().out.startswith(
        "cause temperature (1.00), trainer: the values are those of temperature 2,"
    )
    assert main(command) == 1
    assert "cause" not in capsys.readouterr().out
    command = [*frozen(tmp_path, rollout, replace(trainer, weight_version=2)), "--weights-root", str(weights_root)]
    main([*command, "--causes", "60"])
    assert capsys.readouterr().out.startswith("cause stale_weights (")


def test_tokens_that_a_trainer_did_not_send_are_not_guessed(
    weights_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout, trainer = true_pair(weights_root, "a")
    assert main([*frozen(tmp_path, rollout, replace(trainer, tokens=None)), "--weights-root", str(weights_root)]) == 0
    other = replace(trainer, tokens=None, tokens_digest="ab" * 32)
    assert main([*frozen(tmp_path, rollout, other), "--weights-root", str(weights_root)]) == 2
    assert "was given other tokens than the rollout, and did not send them" in capsys.readouterr().err


def test_a_trainer_without_a_finite_value_is_not_0_away_from_anything(
    weights_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.replay.__main__.OURS", ("strict",))  # the others load engines
    rollout, trainer = true_pair(weights_root, "a")
    trainer = replace(trainer, logprobs=np.full_like(trainer.logprobs, np.nan))
    arguments = frozen(tmp_path, rollout, trainer)[:1]
    assert main([*arguments, "--weights-root", str(weights_root)]) == 1
    said = capsys.readouterr().out
    assert "trainer: the ops strict do NOT give 32 reported values, from which they are not finitely away" in said
    assert "positions, sampling, cache or the engine" in said
