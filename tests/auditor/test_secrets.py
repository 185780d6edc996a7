"""No password of a ledger's URL is in a message, whatever is wrong with the URL, and none of its hosts either."""

import subprocess
import sys
from pathlib import Path

import pytest

from auditor.config import load_config
from auditor.errors import AuditorError, ConfigError
from auditor.storage.database import open_database
from tests.auditor.processes import REPOSITORY

URLS = [
    "postgresql://auditor:hunt%er2secret@127.0.0.1:9/auditor",  # no escape
    "postgresql://auditor:hunt/er2secret@127.0.0.1:9/auditor",  # the port would be the password's first part
    "postgresql://auditor:hunt@er2secret@127.0.0.1:9/auditor",  # and the host its second
    "postgresql://auditor:hunter2secret@no-such-host.invalid/auditor",
    "postgresql://auditor:hunter2secret@127.0.0.1:9/auditor",
    "postgresql://auditor:hunter2secret@[127.0.0.1/auditor",
]


@pytest.mark.parametrize("url", URLS)
def test_nothing_of_a_url_is_in_the_error_about_it(url: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(AuditorError) as failed:
        open_database(url, True)
    for part in ("hunt", "er2", "secret", "no-such-host"):
        assert part not in str(failed.value)
    assert failed.value.__suppress_context__, "nor in a traceback of it"


@pytest.mark.parametrize("url", URLS[:2])
def test_a_start_with_such_a_url_ends_in_one_line_without_it(url: str) -> None:
    pytest.importorskip("psycopg")
    command = [sys.executable, "-m", "auditor.main", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--ledger", url]
    ended = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("auditor: ")
    assert ended.stderr.count("\n") == 1
    assert "hunt" not in ended.stderr + ended.stdout
    assert "secret" not in ended.stderr + ended.stdout


def test_a_configuration_that_is_no_yaml_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "auditor.yaml").write_text('http: "127.0.0.1:0"\nledger: "postgresql://auditor:s3cret@host/auditor\n')
    with pytest.raises(ConfigError, match=r"line [0-9]+: not YAML") as failed:
        load_config(tmp_path / "auditor.yaml", {})
    assert "s3cret" not in str(failed.value)
