"""How the GPU tests run an engine: its processes may outlive their parent, and one that hangs leaves stacks."""

import subprocess
import sys
import time

import pytest

from tests.gpu import engines

# A parent that ends at once while a process of its own lives on, with the output that it inherited.
ORPHANING = "import os, subprocess; subprocess.Popen(['sleep', '30']); print('done', flush=True); os._exit(0)"


def test_a_process_that_outlives_its_parent_holds_nobody_up(tmp_path):
    begin = time.monotonic()
    assert engines._run([sys.executable, "-c", ORPHANING], tmp_path / "log") == "exit code 0"
    assert time.monotonic() - begin < 10
    assert (tmp_path / "log").read_text() == "done\n"


def test_through_a_pipe_it_would():
    """The control, and what the tests on two GPUs once died of."""
    process = subprocess.Popen([sys.executable, "-c", ORPHANING], stdout=subprocess.PIPE, start_new_session=True)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        assert process.poll() == 0
    finally:
        engines.end(process)


def test_one_that_hangs_leaves_the_stacks_of_its_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "SECONDS", 2.0)
    hanging = "import time\ndef waiting_for_a_peer():\n    time.sleep(60)\nwaiting_for_a_peer()"
    assert engines._run([sys.executable, "-c", hanging], tmp_path / "log") == "no result in 2 s"
    assert "waiting_for_a_peer" in (tmp_path / "log").read_text()
