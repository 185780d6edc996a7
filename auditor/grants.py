"""Who may report and read which runs: bearer tokens, read again when their files change. No token is ever logged.

`token_file` holds one token for every run. `tokens_file` is YAML with a token for each job or cluster:

    - {name: cluster-a, sha256: 5e88…, runs: ["cluster-a.*"]}
    - {name: nightly, token: s3cret, runs: [nightly-1, nightly-2]}

Patterns are a shell's: `*` for any characters, `?` for one, `[ab]` for one of these. `sha256` is that of the token, so
that the file itself opens nothing.
"""

import hashlib
import hmac
import logging
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from auditor.bearer import bearer
from auditor.errors import ConfigError
from auditor.yaml_tree import read_yaml

log = logging.getLogger(__name__)
_EVERY_RUN: Final = "*"


@dataclass(frozen=True, slots=True)
class Grant:
    """What one token opens. name: for the log and the metrics; runs: patterns of run ids."""

    name: str
    runs: tuple[str, ...]

    def covers(self, run_id: str) -> bool:
        """Whether the run's records may be sent and read."""
        return any(fnmatchcase(run_id, pattern) for pattern in self.runs)

    @property
    def covers_all(self) -> bool:
        """Whether it is bound to no runs at all."""
        return _EVERY_RUN in self.runs


EVERYTHING: Final = Grant("", (_EVERY_RUN,))


class Grants:
    """Call it with an `authorization` header for the grant, None where the token is none of ours.

    token_file, tokens_file: None where there is none; without either of them everybody is granted everything.
    """

    def __init__(self, token_file: Path | None = None, tokens_file: Path | None = None) -> None:
        self._readers = [
            (path, read) for path, read in ((token_file, _read_one), (tokens_file, _read_many)) if path is not None
        ]
        self._seen: dict[Path, tuple[int, int]] = {}
        self._held: dict[Path, dict[bytes, Grant]] = {}
        for path, read in self._readers:
            self._held[path] = read(path)
            self._seen[path] = _stamp(path)

    def __call__(self, authorization: str | bytes) -> Grant | None:
        """The grant of `Bearer TOKEN`. A file that cannot be read now leaves its last good tokens in force."""
        if not self._readers:
            return EVERYTHING
        given = authorization.encode() if isinstance(authorization, str) else authorization
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            return None
        digest, found = hashlib.sha256(token.strip()).digest(), None
        for path, read in self._readers:
            for known, grant in self._current(path, read).items():
                if hmac.compare_digest(digest, known):
                    found = grant
        return found

    def _current(self, path: Path, read: Any) -> dict[bytes, Grant]:
        try:
            stamp = _stamp(path)
            if stamp != self._seen[path]:
                self._seen[path] = stamp
                self._held[path] = read(path)
        except ConfigError as error:
            log.warning("the tokens read before stay in force: %s", error)
        return self._held[path]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)


def _read_one(path: Path) -> dict[bytes, Grant]:
    token = _text("token_file", path).strip()
    if not token:
        raise ConfigError(f"token_file {path} is empty; it holds the bearer token")
    return {_digest(token, f"token_file {path}"): EVERYTHING}


def _digest(token: str, where: str) -> bytes:
    try:
        bearer(token)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return hashlib.sha256(token.encode()).digest()


def _read_many(path: Path) -> dict[bytes, Grant]:
    entries = read_yaml(_text("tokens_file", path), f"tokens_file {path}")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"tokens_file {path}: a list of tokens is expected, each with name, sha256 or token, and runs"
        )
    grants: dict[bytes, Grant] = {}
    for number, entry in enumerate(entries, 1):
        digest, grant = _entry(f"tokens_file {path}, entry {number}", entry)
        if digest in grants:
            raise ConfigError(f"tokens_file {path}, entry {number}: the same token as {grants[digest].name!r} has")
        grants[digest] = grant
    return grants


def _entry(where: str, entry: Any) -> tuple[bytes, Grant]:
    if not isinstance(entry, dict) or not set(entry) <= {"name", "token", "sha256", "runs"}:
        raise ConfigError(f"{where}: a mapping with name, sha256 or token, and runs is expected")
    name, runs = entry.get("name"), entry.get("runs")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: name is missing; it says in the log whose token it is")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, str) and run for run in runs):
        raise ConfigError(f"{where}: runs must be a list of run ids or patterns such as {name}.*")
    if ("token" in entry) == ("sha256" in entry):
        raise ConfigError(f"{where}: give either sha256 or token")
    if "token" in entry:
        if not isinstance(entry["token"], str):
            raise ConfigError(f"{where}: token must be text")
        return _digest(entry["token"].strip(), where), Grant(name, tuple(runs))
    try:
        digest = bytes.fromhex(entry["sha256"])
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"{where}: sha256 must be 64 hex digits, in quotes")
    return digest, Grant(name, tuple(runs))


def _text(setting: str, path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} {path}: not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{setting} {path}: {error.strerror}") from None
