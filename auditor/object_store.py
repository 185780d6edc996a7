"""Folders and object stores behind one door: pyarrow's file systems, an extra of its own, imported when asked for.

A place is a folder or a URL (`s3://bucket/prefix`). Credentials come from where each store's own tools look, such as
AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; no setting of the auditor holds one.
"""

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from auditor.errors import ConfigError

_CONNECT_S: Final = 5.0
# Of silence on a connection. Twice that is less than the half minute that an orchestrator gives a process to end, and
# whoever writes or fetches tries again later anyway.
_REQUEST_S: Final = 10.0
_ATTEMPTS: Final = 2


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """How an S3 store is reached that is not Amazon's own. endpoint: its URL. region: where it wants one."""

    endpoint: str = ""
    region: str = ""


AMAZON: Final = StoreAccess()


def is_url(place: str) -> bool:
    """Whether a place is a URL and not a folder of this machine."""
    return "://" in place


def open_place(setting: str, place: str, access: StoreAccess) -> tuple[Any, str]:
    """The pyarrow file system of a place and the path in it; ConfigError names the setting."""
    try:
        from pyarrow import fs  # noqa: PLC0415 - an extra of its own
    except ImportError:
        raise ConfigError(f"{setting} {place} needs pyarrow: install the extra `archive`") from None
    try:
        if not is_url(place):
            return fs.LocalFileSystem(), place
        if place.startswith("s3://") and (access.endpoint or access.region):
            return _s3(fs, place, access)
        files, path = fs.FileSystem.from_uri(place)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} {place}: {' '.join(str(error).split())}") from None
    return files, path


def _s3(fs: Any, place: str, access: StoreAccess) -> tuple[Any, str]:
    where = urlsplit(place)
    settings: dict[str, Any] = {
        "connect_timeout": _CONNECT_S,
        "request_timeout": _REQUEST_S,
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
    }
    if access.region:
        settings["region"] = access.region
    if access.endpoint:
        endpoint = urlsplit(access.endpoint)
        if endpoint.scheme not in ("http", "https") or not endpoint.netloc:
            raise ValueError(f"store_endpoint {access.endpoint!r} is no http:// or https:// URL")
        settings |= {"scheme": endpoint.scheme, "endpoint_override": endpoint.netloc}
        # A store of one's own has no regions, and looking one up would ask Amazon.
        settings.setdefault("region", "us-east-1")
    return fs.S3FileSystem(**settings), (where.netloc + where.path).rstrip("/")
