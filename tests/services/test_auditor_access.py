"""A job that reports to an auditor with guarded ports: bearer token, and certificates on both sides."""

import shutil
from dataclasses import replace

import pytest

from auditor.client import AuditClient
from services.auditor_access import AuditorAccess
from services.errors import AuditorError
from services.referee import wait_until_ready
from services.verdicts import AuditorApi
from tests.auditor.processes import running_auditor
from tests.auditor.samples import pair
from tests.auditor.test_tls import authority, issue

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")


@pytest.fixture
def access(tmp_path):
    ours = authority(tmp_path / "ours", "ours")
    certificate, key = issue(ours, tmp_path, "server", 1)
    client, client_key = issue(ours, tmp_path, "client", 2)
    token = tmp_path / "token"
    token.write_text("let me in\n")
    flags = ("--tls-certificate", certificate, "--tls-key", key, "--tls-client-ca", ours / "ca.pem")
    with running_auditor(tmp_path / "a", *map(str, flags), "--token-file", str(token)) as auditor:
        yield AuditorAccess(
            grpc=auditor.grpc,
            http=f"https://{auditor.http}",
            token_file=str(token),
            tls_ca=str(ours / "ca.pem"),
            tls_certificate=str(client),
            tls_key=str(client_key),
        )


def test_records_go_in_and_verdicts_come_out_with_token_and_certificate(access, tmp_path):
    wait_until_ready(access, 10.0)
    client = AuditClient(
        access.grpc, "run", spool_dir=tmp_path / "spool", token=access.token(), credentials=access.credentials()
    )
    rollout, trainer = pair()
    client.submit_rollout(rollout)
    client.submit_trainer(trainer)
    assert client.close().accepted == 2
    found = AuditorApi(access, "run").step(0, samples=1, seconds=10.0)
    assert found is not None
    assert found.by_verdict == {"match": 1}


def test_without_the_token_there_are_no_verdicts(access):
    assert AuditorApi(replace(access, token_file=""), "run").run() is None
    assert AuditorApi(access, "run").metrics().startswith("# HELP")


def test_without_a_certificate_the_auditor_does_not_answer(access):
    with pytest.raises(AuditorError, match="is not ready after 1 s"):
        wait_until_ready(replace(access, tls_certificate="", tls_key=""), 1.0)
