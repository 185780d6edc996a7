"""Whole runs as a person starts them: Ray, vLLM, Megatron-core and the auditor, on a tiny model."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.models import write_tiny_model

pytestmark = pytest.mark.slow

STEPS = 4
SAMPLES = 6
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


class Started:
    """`python -m services.main` as a child process, its output read line by line."""

    def __init__(self, *arguments, program="services.main", cwd=None):
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", program, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=cwd
        )
        self.output = ""

    def read_until(self, text):
        """Read on until a line contains `text`."""
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"the run ended with {self.process.wait()} before it said {text!r}:\n{self.output}")

    def end(self, code):
        """Read to the end, and require the exit code."""
        self.output += self.process.stdout.read()
        assert self.process.wait() == code, self.output
        return self.output

    def descendants(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def one(self, word):
        """A descendant whose command line has `word`."""
        return next(p for p in self.descendants() if word in " ".join(p.cmdline()))


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    tree = {
        "run": {"steps": STEPS, "directory": str(folder / "runs"), "checkpoint_every": 2},
        "model": {"path": str(write_tiny_model(folder / "model"))},
        "numerics": {"segments": 2, "threads": 1},
        "task": {"name": "tokens", "prompts_per_step": 2, "samples_per_prompt": 3},
        "rollout": {"max_new_tokens": 5, "max_model_len": 64, "kv_cache_mb": 16},
        "trainer": {"learning_rate": 1e-3},
        "auditor": {"recompute_rate": 1.0},
    }
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def _latest(config_file):
    folder = (config_file.parent / "runs" / "latest").resolve()
    return folder, json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def whole(config_file):
    """A strict run with two ranks on each side, whose auditor is killed after the second step."""
    run = Started("--config", config_file, "--set", "trainer.tp_size=2", "--set", "rollout.tp_size=2")
    run.read_until("   1   ")
    run.one("auditor.main").kill()
    # What the ranks leave behind where they are killed: where they met.
    shutil.copyfile(config_file.parent / "runs" / "latest" / "rendezvous", config_file.parent / "rendezvous")
    output = run.end(0)
    return output, *_latest(config_file)


def test_a_strict_run_compares_every_sample_and_not_one_bit_differs(whole):
    output, _, summary = whole
    assert summary["numerics"] == "strict"
    assert summary["steps"] == STEPS
    assert summary["verdicts"] == {"match": STEPS * SAMPLES}
    assert summary["compared_tokens"] == summary["recomputed_tokens"] > 0
    assert (summary["mismatched_tokens"], summary["max_abs_diff"], summary["recomputed_mismatched"]) == (0, 0, 0)
    assert summary["not_comparable_samples"] == 0
    assert len(summary["reward_per_step"]) == STEPS
    assert {"rollout", "score", "train", "publish"} <= summary["seconds_by_phase"].keys()
    assert 0 < summary["peak_memory_bytes"] < 8 * 2**30
    assert "NOT CLEAN" not in output


def test_the_auditor_killed_in_the_middle_loses_nothing_and_counts_nothing_twice(whole):
    _, folder, summary = whole
    assert summary["auditor_restarts"] == 1
    records = summary["records"]
    assert records["accepted"] + records["duplicate"] == 2 * STEPS * SAMPLES
    assert (records["refused"], records["dropped"], records["queued"], records["spooled"]) == (0, 0, 0, 0)
    ledger = sqlite3.connect(folder / "ledger.sqlite")
    per_side = dict(ledger.execute("SELECT side, count(*) FROM records GROUP BY side"))
    assert per_side == {"rollout": STEPS * SAMPLES, "trainer": STEPS * SAMPLES}


def test_a_run_leaves_a_plot_and_only_the_weights_that_it_should_keep(whole):
    _, folder, summary = whole
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    kept = sorted(p.name for p in (folder / "weights").iterdir())
    assert kept[-1] == f"v{STEPS + 1:06d}"
    assert summary["weights"]["version"] == STEPS + 1


def test_an_interrupted_run_leaves_no_process_and_resumed_it_ends_with_the_bits_of_a_whole_one(whole, config_file):
    run = Started("--config", config_file, "--set", "run.steps=100")
    run.read_until("   2   ")
    left = run.descendants()
    for _ in range(3):  # as an impatient supervisor does
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    output = run.end(130)
    assert "to go on from step" in output
    assert "everything that was started has been stopped" in output
    assert "Traceback" not in output
    _gone(left)
    interrupted = (config_file.parent / "runs" / "latest").resolve()

    shutil.rmtree(interrupted / "weights")
    resumed = Started("--resume", interrupted, "--set", f"run.steps={STEPS}")
    resumed.end(0)
    folder, summary = _latest(config_file)
    assert folder == interrupted
    _is_the_whole_run(summary, whole[2])
    assert summary["records"]["refused"] == 0


def test_a_cluster_that_was_left_does_not_make_sigterm_kill():
    program = (
        "import os, signal\n"
        "from services.cluster import ray_cluster\n"
        "from services.config import Ray\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('heard'))\n"
        "with ray_cluster(Ray(), 1): pass\n"
        "os.kill(os.getpid(), signal.SIGTERM)"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout == b"heard\n"


def test_a_run_killed_outright_takes_its_processes_along_and_resumed_it_ends_with_the_same_bits(
    whole, config_file, tmp_path
):
    """Also moved, renamed, and from another folder than that in which it was started with relative paths."""
    relative = ("--set", "run.directory=runs", "--set", "model.path=model")
    run = Started("--config", config_file, "--set", "run.steps=100", *relative, cwd=config_file.parent)
    run.read_until("   2   ")  # a step past the checkpoint
    # Two small agents of Ray's own go a minute later, once they have given up telling the cluster of its end.
    left = [p for p in run.descendants() if not any(agent in p.cmdline()[0] for agent in RAY_AGENTS)]
    run.process.kill()
    run.process.wait()
    _gone(left)
    killed = (config_file.parent / "runs" / "latest").resolve()
    moved = killed.with_name("moved")
    killed.rename(moved)

    refused = Started("--resume", moved, "--set", "trainer.tp_size=2", cwd=tmp_path).end(2)
    (line,) = refused.splitlines()
    assert re.match(
        r"error: trainer\.tp_size = 2: steps? 2 .* begun with 1 and must be done again to the same bits", line
    )

    Started("--resume", moved, "--set", f"run.steps={STEPS}", cwd=tmp_path).end(0)
    folder, summary = _latest(config_file)
    assert folder == moved
    assert summary["run_id"] == killed.name
    _is_the_whole_run(summary, whole[2])
    ledger = sqlite3.connect(folder / "ledger.sqlite")
    per_side = dict(ledger.execute("SELECT side, count(*) FROM records WHERE step < ? GROUP BY side", (STEPS,)))
    assert per_side == {"rollout": STEPS * SAMPLES, "trainer": STEPS * SAMPLES}


def test_the_rollout_actor_killed_ends_the_run_in_one_line_with_the_summary_of_what_was_done(config_file):
    run = Started("--config", config_file, "--set", "run.steps=100")
    run.read_until("   2   ")
    folder, found = _ends_by_the_death_of(run, "RolloutActor", "rollout", config_file)
    assert found["steps"] >= 3
    assert found["compared_tokens"] > found["mismatched_tokens"] == 0
    assert re.search(rf"to go on from step \d+: --resume {re.escape(str(folder))}\n", run.output)


def test_a_copy_goes_on_with_other_keys_where_no_step_is_redone_and_a_killed_rank_ends_it_too(whole, config_file):
    """The whole run had two ranks on each side. Those of the trainer meet again, although it looks as if killed."""
    copy = whole[1].with_name("copy")
    shutil.copytree(whole[1], copy)
    shutil.copyfile(config_file.parent / "rendezvous", copy / "rendezvous")
    changed = ("--set", "rollout.tp_size=1", "--set", "rollout.temperature=0.5")
    run = Started("--resume", copy, "--set", "run.steps=100", *changed)
    run.read_until(f"   {STEPS}   ")
    assert f"{SAMPLES} match" in run.output.splitlines()[-1]
    folder, found = _ends_by_the_death_of(run, "TrainerActor", "trainer", config_file)
    assert folder == copy
    assert found["run_id"] == whole[2]["run_id"]
    assert found["verdicts"]["match"] >= (STEPS + 1) * SAMPLES
    assert found["mismatched_tokens"] == 0


def _ends_by_the_death_of(run, process, side, config_file):
    left = run.descendants()
    run.one(process).kill()
    output = run.end(2)
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert re.match(rf"error: the {side} actor died: .*; its output is in .*/logs/{side}\.log$", line)
    assert output.endswith(line + "\n")
    assert "Traceback" not in output
    assert f"the {side} does not answer; what it had not sent to the auditor may be lost" in output
    _gone(left)
    folder, found = _latest(config_file)
    assert found["error"] == line.removeprefix("error: ")
    assert len(found["per_step"]) == found["steps"]
    return folder, found


def test_a_disk_that_fills_up_under_the_run_ends_it_in_one_line_and_leaves_nothing(config_file, make_disk):
    disk = make_disk("48m")
    run = Started("--config", config_file, "--set", "run.steps=100", "--set", f"run.directory={disk}")
    run.read_until("   0   ")
    left = run.descendants()
    with suppress(OSError), (disk / "something else").open("wb", buffering=0) as file:
        while file.write(bytes(2**14)):
            pass
    output = run.end(2)
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert re.search(r"disk full: weight version \d|No space left on device: '/|cannot be written: No space left", line)
    assert "Traceback" not in output
    _gone(left)
    (folder,) = disk.glob("2*")
    assert not list(folder.glob("*/.*.partial"))


def test_one_unit_in_the_last_place_of_a_strict_run_is_said_with_its_side_and_exit_code_1(config_file):
    run = Started("--config", config_file, "--set", "run.steps=1", program="tests.services.cheating")
    output = run.end(1)
    _, summary = _latest(config_file)
    assert summary["mismatched_tokens"] == SAMPLES
    assert summary["mismatched_samples_by_side"] == {"rollout": SAMPLES}
    assert f"NOT CLEAN: {SAMPLES} tokens differ between rollout and trainer" in output
    assert "alert MismatchedTokens (critical): Run " in output


def test_a_model_that_yields_nan_ends_the_run_in_one_line(config_file, tmp_path):
    model = write_tiny_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors")
    output = Started("--config", config_file, "--set", f"model.path={model}").end(2)
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "nan" in line
    assert "Traceback" not in output


def test_a_native_run_shows_what_strict_removes_and_says_its_alert(config_file):
    run = Started("--config", config_file, "--numerics", "native", "--set", "run.steps=1")
    run.read_until("alert MismatchedTokens (critical): Run ")
    _, summary = _latest(config_file)
    run.one("auditor.main")  # The account comes before anything is taken down, which may hang or be interrupted.
    run.end(0)
    assert summary["mismatched_tokens"] > 0
    assert summary["max_abs_diff"] > 0


def _is_the_whole_run(summary, whole):
    """Also what the job itself knows of the steps before it was resumed."""
    assert summary["weights"] == whole["weights"]
    assert summary["verdicts"] == {"match": STEPS * SAMPLES}
    assert summary["steps"] == STEPS
    assert summary["reward_per_step"] == whole["reward_per_step"]
    assert [step["loss"] for step in summary["per_step"]] == [step["loss"] for step in whole["per_step"]]


def _gone(processes, seconds=20.0):
    deadline = time.monotonic() + seconds
    while alive := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, [" ".join(p.cmdline())[:120] for p in alive]
        time.sleep(0.2)
