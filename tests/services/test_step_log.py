"""The job's own memory of its steps, across an interruption."""

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


def test_a_log_without_a_step_before_the_checkpoint_is_named(log):
    log.append(_result(0))
    with pytest.raises(CheckpointError, match=r"steps\.jsonl does not hold the 2 steps before the checkpoint"):
        log.go_on(2)
