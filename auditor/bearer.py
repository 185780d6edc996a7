"""A bearer token, as the header of a call carries it."""

from auditor.errors import ConfigError


def bearer(token: str) -> str:
    """`Bearer TOKEN`. ConfigError, without the token, where no header can carry it."""
    if not (token and token.isascii() and token.isprintable()):
        raise ConfigError("the token must be one line of printable ASCII")
    return f"Bearer {token}"
