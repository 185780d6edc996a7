"""Both ports under mutual TLS: a client without a certificate gets nothing; a renewed one is taken up while running."""

import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from auditor.client import AuditClient
from auditor.config import Config, left_open, load_config
from auditor.errors import ConfigError
from auditor.proto import audit_pb2 as pb
from auditor.proto.audit_pb2_grpc import AuditServiceStub
from auditor.submit import main as submit
from auditor.tls import TlsFiles
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import pair

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def authority(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 2, "-subj",
            f"/CN={name}", "-keyout", folder / "ca.key", "-out", folder / "ca.pem")  # fmt: skip
    return folder


def issue(ca: Path, folder: Path, name: str, serial: int) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 under `folder`/name.pem and its key."""
    key, request, certificate, extra = (folder / f"{name}.{suffix}" for suffix in ("key", "csr", "pem", "ext"))
    extra.write_text("subjectAltName=IP:127.0.0.1\n")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
            "-keyout", key, "-out", request)  # fmt: skip
    openssl("x509", "-req", "-in", request, "-CA", ca / "ca.pem", "-CAkey", ca / "ca.key", "-days", 1, "-set_serial",
            serial, "-extfile", extra, "-out", certificate)  # fmt: skip
    return certificate, key


def context(ca: Path, client: tuple[Path, Path] | None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(ca / "ca.pem"))
    if client is not None:
        made.load_cert_chain(*client)
    return made


def ready(address: str, how: ssl.SSLContext) -> int:
    with urllib.request.urlopen(f"https://{address}/readyz", timeout=5, context=how) as answer:
        return int(answer.status)


def test_only_clients_with_a_certificate_of_the_authority_are_served(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path / "ours", "ours"), authority(tmp_path / "theirs", "theirs")
    certificate, key = issue(ours, tmp_path, "server", 1)
    client, stranger = issue(ours, tmp_path, "client", 2), issue(theirs, tmp_path, "stranger", 3)
    flags = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--tls-client-ca", str(ours / "ca.pem"))
    with running_auditor(tmp_path / "a", *flags) as auditor:
        assert ready(auditor.http, context(ours, client)) == 200
        for unwelcome in (None, stranger):
            with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
                ready(auditor.http, context(ours, unwelcome))
        authority_pem = (ours / "ca.pem").read_bytes()
        for held, accepted in ((client, 2), (None, 0), (stranger, 0)):
            chain, private = (path.read_bytes() for path in held) if held else (None, None)
            credentials = grpc.ssl_channel_credentials(authority_pem, private, chain)
            spool = tmp_path / f"spool{accepted}{held is None}"
            reporter = AuditClient(auditor.grpc, "run", spool_dir=spool, credentials=credentials)
            for record in pair(f"{accepted}"):
                (reporter.submit_rollout if record.side == "rollout" else reporter.submit_trainer)(record)  # type: ignore[arg-type]
            assert reporter.close(timeout=3).accepted == accepted
        left = [str(tmp_path / "spool0True"), "--address", auditor.grpc, "--tls-ca", str(ours / "ca.pem")]
        assert submit([*left, "--tls-certificate", str(client[0]), "--tls-key", str(client[1])]) == 0


def test_a_renewed_certificate_is_taken_up_without_a_restart(tmp_path: Path) -> None:
    ours = authority(tmp_path / "ours", "ours")
    certificate, key = issue(ours, tmp_path, "server", 10)
    with running_auditor(tmp_path / "a", "--tls-certificate", str(certificate), "--tls-key", str(key)) as auditor:
        host, port = auditor.http.split(":")
        assert _serial(host, int(port), ours) == "0A"
        issue(ours, tmp_path, "server", 11)
        deadline = time.monotonic() + 20
        for address in (auditor.http, auditor.grpc):
            host, port = address.split(":")
            while _serial(host, int(port), ours) != "0B":
                assert time.monotonic() < deadline, address
                time.sleep(0.2)


def test_a_withdrawn_authority_lets_nobody_in_on_either_port(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path / "ours", "ours"), authority(tmp_path / "theirs", "theirs")
    certificate, key = issue(ours, tmp_path, "server", 20)
    old, new = issue(ours, tmp_path, "old", 21), issue(theirs, tmp_path, "new", 22)
    trusted = tmp_path / "trusted.pem"
    shutil.copy(ours / "ca.pem", trusted)
    flags = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--tls-client-ca", str(trusted))
    with running_auditor(tmp_path / "a", *flags) as auditor:
        for lets_in in (_http_lets_in, _grpc_lets_in):
            assert (lets_in(auditor, ours, old), lets_in(auditor, ours, new)) == (True, False)
        shutil.copy(theirs / "ca.pem", trusted)
        deadline = time.monotonic() + 20
        for lets_in in (_http_lets_in, _grpc_lets_in):
            while (lets_in(auditor, ours, old), lets_in(auditor, ours, new)) != (False, True):
                assert time.monotonic() < deadline, lets_in.__name__
                time.sleep(0.3)
        trusted.write_text("half a file")
        time.sleep(2.5)
        assert _http_lets_in(auditor, ours, new), "a broken file leaves the last good authority in force"


def test_a_stamp_is_had_while_a_file_is_gone(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path / "c", tmp_path / "k", tmp_path / "a")
    (tmp_path / "c").touch()
    without = files.stamp()
    (tmp_path / "a").touch()
    assert len(without) == len(files.stamp()) == 3
    assert without != files.stamp()


def _http_lets_in(auditor: AuditorProcess, ours: Path, client: tuple[Path, Path]) -> bool:
    try:
        return ready(auditor.http, context(ours, client)) == 200
    except (urllib.error.URLError, ConnectionError, ssl.SSLError):
        return False


def _grpc_lets_in(auditor: AuditorProcess, ours: Path, client: tuple[Path, Path]) -> bool:
    certificate, key = (path.read_bytes() for path in client)
    credentials = grpc.ssl_channel_credentials((ours / "ca.pem").read_bytes(), key, certificate)
    with grpc.secure_channel(auditor.grpc, credentials) as channel:
        try:
            AuditServiceStub(channel).Submit(pb.SubmitRequest(), timeout=2)
        except grpc.RpcError:
            return False
    return True


def _serial(host: str, port: int, ours: Path) -> str:
    import socket

    how = context(ours, None)
    how.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), timeout=5) as plain,
        how.wrap_socket(plain, server_hostname=host) as secure,
    ):
        certificate = secure.getpeercert()
    assert certificate
    return str(certificate["serialNumber"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"tls_key": "/k"}, "given together"),
        ({"tls_client_ca": "/c"}, "tls_client_ca needs"),
        ({"http": "0.0.0.0:0"}, "can be reached from other machines"),
    ],
)
def test_half_a_tls_configuration_is_refused(flags: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, flags)


@pytest.mark.parametrize(
    ("settings", "host", "said"),
    [
        ({}, "127.0.0.1", ["whoever reaches 127.0.0.1:1 may write records"]),
        ({"token_file": "t"}, "[::1]", []),
        ({"token_file": "t"}, "0.0.0.0", ["grpc: 0.0.0.0:1 speaks plain text", "http: 0.0.0.0:2 speaks plain text"]),
        ({"insecure": True}, "[::]", ["whoever reaches [::]:1", "grpc: [::]:1 speaks", "http: [::]:2 speaks"]),
        ({"tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"}, "0.0.0.0", []),
    ],
)
def test_what_is_open_is_said_at_the_start(settings: dict[str, str], host: str, said: list[str]) -> None:
    addresses = {"grpc": f"{host}:1", "http": f"{host}:2"}
    found = list(left_open(Config.model_validate({**addresses, **settings}), addresses))
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True)), found
