"""The job's own memory of its steps, across an interruption."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from services.errors import CheckpointError
from services.loop import StepResult
from services.records import TrainOutcome, WeightVersion
from services.step_log import StepLog


def _result(step, reward=0.5):
    outcome = TrainOutcome((), loss=-0.25 * step, grad_norm=1.5, clip_fraction=0.0)
    return StepResult(step, reward, 7, outcome, WeightVersion(step + 2, f"{step:064x}", Path("w")), {"train": 0.5})


@pytest.fixture
def log(tmp_path):
    return StepLog(tmp_path / "steps.jsonl")


def test_a_new_run_has_no_earlier_steps(log):
    assert log.go_on(0) == []


def test_the_steps_before_a_checkpoint_come_back_as_they_were(log):
    for step in range(4):
        log.append(_result(step))
    assert log.go_on(4) == [_result(step) for step in range(4)]


def test_a_step_past_the_checkpoint_is_forgotten_since_it_is_done_again(log):
    for step in range(3):
        log.append(_result(step))
    assert log.go_on(2) == [_result(0), _result(1)]
    log.append(_result(2, reward=1.0))
    assert log.go_on(3) == [_result(0), _result(1), _result(2, reward=1.0)]


def test_a_line_that_a_kill_cut_off_is_no_step(log, tmp_path):
    log.append(_result(0))
    log.append(_result(1))
    file = tmp_path / "steps.jsonl"
    file.write_text(file.read_text()[:-9])
    assert log.go_on(1) == [_result(0)]


@pytest.mark.parametrize("tail", [b"\0" * 300, b"\xff\xfe\n", b'{"step": 1, "rew'])
def test_what_a_power_cut_left_at_the_end_is_no_step(log, tmp_path, tail):
    log.append(_result(0))
    with (tmp_path / "steps.jsonl").open("ab") as file:
        file.write(tail)
    assert log.go_on(1) == [_result(0)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda line: 3, "input should be a valid dictionary"),
        (lambda line: None, "input should be a valid dictionary"),
        (lambda line: [line], "input should be a valid dictionary"),
        (lambda line: line | {"step": "1"}, "step: input should be a valid integer"),
        (lambda line: line | {"reward": None}, "reward: input should be a valid number"),
        (lambda line: line | {"weights": "v2"}, "weights: input should be a valid dictionary"),
        (lambda line: line | {"seconds": {"train": "1"}}, r"seconds\.train: input should be a valid number"),
        (lambda line: {k: v for k, v in line.items() if k != "loss"}, "loss: field required"),
    ],
)
def test_a_line_that_holds_something_else_is_named_in_one_line(log, tmp_path, change, says):
    for step in range(2):
        log.append(_result(step))
    file = tmp_path / "steps.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in [lines[0], change(lines[1])]))
    with pytest.raises(CheckpointError, match=rf"steps\.jsonl, line 2 cannot be read: {says}") as error:
        log.go_on(2)
    assert "\n" not in str(error.value)


def test_a_full_disk_is_said_with_the_file_that_has_no_room(make_disk):
    disk = make_disk("64k")
    log = StepLog(disk / "steps.jsonl")
    for step in range(20):
        log.append(_result(step))
    with suppress(OSError), (disk / "something else").open("wb", buffering=0) as file:
        while file.write(bytes(512)):
            pass
    with pytest.raises(OSError, match=r"No space left on device: '.*/steps\.jsonl'"):
        for _ in map(log.append, map(_result, range(20, 100))):
            pass
    with pytest.raises(OSError, match=r"No space left on device: '.*/steps\.jsonl'"):
        log.go_on(20)
    assert sorted(p.name for p in disk.iterdir()) == ["something else", "steps.jsonl"]


def test_each_step_is_on_the_disk_before_anything_counts_on_it(log, tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), fsync(handle))[1])
    log.append(_result(0))
    log.append(_result(1))
    size = (tmp_path / "steps.jsonl").stat().st_size
    assert synced[-1] == size


def test_a_log_without_a_step_before_the_checkpoint_is_named(log):
    log.append(_result(0))
    with pytest.raises(CheckpointError, match=r"steps\.jsonl does not hold the 2 steps before the checkpoint"):
        log.go_on(2)
