"""How the auditor is reached: two addresses, and what it asks of those who call."""

import ssl
import urllib.request
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import cast

from grpc import (
    ChannelCredentials,
    FutureTimeoutError,
    channel_ready_future,
    insecure_channel,
    secure_channel,
    ssl_channel_credentials,
)

from services.errors import AuditorError


@dataclass(frozen=True, slots=True)
class AuditorAccess:
    """Addresses and secrets; files are read when they are needed, by the process that needs them.

    grpc: host:port for records. http: base URL of API, page and /metrics. token_file: bearer token for both; empty
    where none is asked for. tls_ca: PEM authority of the auditor's certificate; empty speaks plain text over gRPC.
    tls_certificate, tls_key: PEM, where the auditor asks its callers for a certificate.
    """

    grpc: str
    http: str
    token_file: str = ""
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""

    def token(self) -> str | None:
        """The bearer token, or None."""
        return Path(self.token_file).read_text().strip() if self.token_file else None

    def credentials(self) -> ChannelCredentials | None:
        """For gRPC; None speaks plain text."""
        if not self.tls_ca:
            return None
        authority, key, chain = (
            Path(file).read_bytes() if file else None for file in (self.tls_ca, self.tls_key, self.tls_certificate)
        )
        return ssl_channel_credentials(authority, key, chain)

    def require_grpc(self, seconds: float) -> None:
        """AuditorError unless something speaks gRPC, and TLS where that is asked for, at `grpc` within `seconds`."""
        credentials = self.credentials()
        with secure_channel(self.grpc, credentials) if credentials else insecure_channel(self.grpc) as channel:
            try:
                channel_ready_future(channel).result(timeout=seconds)
            except FutureTimeoutError:
                raise AuditorError(
                    f"nothing speaks gRPC at auditor.grpc = {self.grpc} after {seconds:.0f} s"
                    + (" (or its certificate is not of auditor.tls_ca)" if credentials else " (or it wants TLS)")
                ) from None

    def get(self, path: str, seconds: float) -> HTTPResponse:
        """Open `path` below the base URL. Raises what urllib raises: OSError, with HTTPError below it."""
        token = self.token()
        request = urllib.request.Request(
            self.http.rstrip("/") + path, headers={"Authorization": f"Bearer {token}"} if token else {}
        )
        return cast(HTTPResponse, urllib.request.urlopen(request, timeout=seconds, context=self._tls()))

    def _tls(self) -> ssl.SSLContext | None:
        if not self.tls_ca:
            return None
        context = ssl.create_default_context(cafile=self.tls_ca)
        if self.tls_certificate:
            context.load_cert_chain(self.tls_certificate, self.tls_key or None)
        return context
