"""Certificates for both ports, taken up again when their files change. Nothing of a key is ever logged."""

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from auditor.errors import ConfigError

_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. client_ca: who must have signed a client's certificate; None asks clients for none."""

    certificate: Path
    key: Path
    client_ca: Path | None

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Key, certificate chain and client authority; ConfigError names the file that cannot be read."""
        return _read(self.key), _read(self.certificate), _read(self.client_ca) if self.client_ca else None

    def stamp(self) -> tuple[int, ...]:
        """Changes when one of the files does."""
        files = (self.certificate, self.key, self.client_ca)
        return tuple(file.stat().st_mtime_ns for file in files if file is not None and file.exists())


def grpc_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that look at the files again at every handshake after a change."""
    seen = files.stamp()

    def configuration() -> "grpc.ServerCertificateConfiguration":
        key, chain, authority = files.read()
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authority)

    def renewed() -> "grpc.ServerCertificateConfiguration | None":
        nonlocal seen
        stamp = files.stamp()
        if stamp == seen:
            return None
        try:
            fresh = configuration()
        except ConfigError:
            return None  # half-way through a change; the one in force stays
        seen = stamp
        return fresh

    # None keeps the certificate in force, as gRPC documents; the stubs leave it out.
    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        renewed,  # type: ignore[arg-type]
        require_client_authentication=files.client_ca is not None,
    )


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """A server's context; ConfigError where the files do not fit together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    files.read()
    try:
        context.load_cert_chain(files.certificate, files.key)
        if files.client_ca is not None:
            context.load_verify_locations(files.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"tls_certificate {files.certificate} and tls_key {files.key}: {error}") from None
    return context


class Renewal:
    """A thread that loads changed files into a context; connections made after that see them."""

    def __init__(self, files: TlsFiles, context: ssl.SSLContext, look_s: float = _LOOK_S) -> None:
        self._files, self._context, self._look_s = files, context, look_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tls-renewal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        seen = self._files.stamp()
        while not self._stop.wait(self._look_s):
            stamp = self._files.stamp()
            if stamp == seen:
                continue
            try:
                self._context.load_cert_chain(self._files.certificate, self._files.key)
            except (ssl.SSLError, OSError):
                continue  # half-way through a change; looked at again
            seen = stamp


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a PEM file is expected") from None
