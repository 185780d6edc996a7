"""Certificates for both ports, taken up again when their files change. Nothing of a key is ever logged."""

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from auditor.errors import ConfigError

_LOOK_S = 1.0


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
        return tuple(_changed_at(file) for file in files if file is not None)


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
    # A resumed session would be let in on the word of an authority that was withdrawn meanwhile.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
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
    """Gives every new connection to `context` a context of the files as they are now: certificate, key and authority.

    A thread makes a new one when the files change; while they do not fit together the one before stays in force.
    """

    def __init__(self, files: TlsFiles, context: ssl.SSLContext) -> None:
        self._files, self._current = files, context
        # Called at every handshake, also where the client names no server. An authority cannot be taken out of a
        # context that has it, so the whole context is another one.
        context.sni_callback = self._renew
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tls-renewal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _renew(self, connection: ssl.SSLObject, name: str | None, listening: ssl.SSLContext) -> None:
        connection.context = self._current

    def _run(self) -> None:
        seen = self._files.stamp()
        while not self._stop.wait(_LOOK_S):
            stamp = self._files.stamp()
            if stamp == seen:
                continue
            try:
                self._current = http_context(self._files)
            except ConfigError:
                continue  # half-way through a change; looked at again
            seen = stamp


def _changed_at(path: Path) -> int:
    """0 where there is no file at the moment, as in the middle of a renewal."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a PEM file is expected") from None
