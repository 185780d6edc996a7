"""Faults in real vLLM and Megatron-core: a job goes wrong in the midst of its steps, and the auditor's API says why."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from auditor.replay.__main__ import main as replay
from services.errors import ConfigError
from services.faults.broken import broken, chosen
from services.faults.fault import Broken
from services.faults.table import FAULTS

KINDS = (
    *("stale weights", "LoRA not merged", "temperature", "top-p", "off-by-one", "shifted mask", "EOS filler"),
    *(
        "retokenised tokens",
        "stale KV",
        "chunk boundary",
        "RoPE scaling",
        "CP slice",
        "bf16 head",
        "split-K",
        "routing",
    ),
)
# What is said of them is exact: a prediction that has the bits, or a field of the reports. A search of several steps
# of rounding takes the seconds of an idle core, which a test cannot count on.
EXACT = ("one sync skipped", "prefix cache not reset", "scaled by 4 in the trainer", "loss mask one early")


def firsts(one: Broken) -> Counter:
    return Counter(sample.judgement["cause"] for sample in one.samples)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Broken]]:
    folder = tmp_path_factory.mktemp("faults")
    return folder, {one.fault.name: one for one in broken(None, folder, chosen(EXACT), each=2, seconds=120.0)}


def test_every_kind_of_the_list_is_there_and_names_are_given_once() -> None:
    assert tuple(dict.fromkeys(fault.kind for fault in FAULTS)) == KINDS
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    with pytest.raises(ConfigError, match="there is no fault 'lora'; kinds are: stale weights, LoRA not merged"):
        chosen(["lora"])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_a_fault_in_a_real_engine_gets_its_side_and_cause_and_the_steps_before_it_match(
    found: tuple[Path, dict[str, Broken]], name: str
) -> None:
    one = found[1][name]
    (cause,) = one.fault.causes & firsts(one).keys()
    assert firsts(one) == {cause: 2}
    side, verdict = ("none", "not_comparable") if one.fault.side == "declared" else (one.fault.side, "mismatch")
    assert {(s.judgement["side"], s.judgement["verdict"]) for s in one.samples} == {(side, verdict)}
    assert len(one.clean) == 2 * one.fault.sound_steps
    assert all(sample.sound for sample in one.clean)
    assert one.fault.sound_steps >= 2


@pytest.mark.slow
def test_a_capsule_of_a_broken_engine_is_replayed_to_the_op_that_was_broken(
    found: tuple[Path, dict[str, Broken]], capsys: pytest.CaptureFixture[str]
) -> None:
    """No engine of ours has the bits: the reference with one op changed does."""
    (capsule,) = (found[0] / "capsules").glob("*-scaled-by-4-in-the-trainer.capsule")
    assert replay([str(capsule), "--weights-root", str(found[0] / "weights")]) == 1
    said = capsys.readouterr().out
    assert "trainer: by the digests of its layers it leaves the reference at layer 0" in said
    assert "capsule: the cause suggested was rope_scaling (1.00)" in said
    assert "trainer: the ops strict but for RoPE scaled linearly by 4 reproduce the reported bits" in said
    assert "trainer: first to differ on equal inputs: rope at layers.0.rope" in said
    assert "trainer: with the reference's rope: the difference is gone" in said


@pytest.mark.soak
def test_nine_in_ten_faults_of_real_engines_get_a_right_cause_first_and_none_is_missed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "auditor.faults", "--engines", "--each", "4", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=7200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "out" / "capsules").iterdir())) == len(FAULTS)


@pytest.mark.parametrize("missing", ["vllm", "megatron"])
def test_an_engine_that_is_not_installed_is_one_line(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from auditor.faults.__main__ import main; "
    command = [sys.executable, "-c", code + "sys.exit(main(['--engines']))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"faults: --engines needs {missing}" in done.stderr
