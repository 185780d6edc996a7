"""The bearer token, read again when its file changes, so that it is rotated without a restart. It is never logged."""

from pathlib import Path


class TokenFile:
    """Call it for the token in force; None where no file was given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._token: str | None = None

    def __call__(self) -> str | None:
        """The token; the last good one while the file is missing or empty."""
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_size)
            if seen != self._seen:
                token = self._path.read_text("utf-8").strip()
                if token:
                    self._token, self._seen = token, seen
        except OSError:
            return self._token
        return self._token
