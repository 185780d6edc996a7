"""How a command of the auditor ends: with an exit code, and with one line where it is interrupted."""

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130


def end(name: str, main: Callable[[list[str]], int]) -> NoReturn:
    """Exit with what `main` says of the command line: 130 after SIGINT or SIGTERM, 2 where it is no text."""
    signal.signal(signal.SIGTERM, _interrupt)
    for argument in sys.argv[1:]:
        if not _is_text(argument):
            print(f"{name}: argument {argument!a} is not UTF-8 text", file=sys.stderr)
            sys.exit(2)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # SIGTERM unwinds like Ctrl-C, so that both leave nothing behind.
    raise KeyboardInterrupt


def _is_text(argument: str) -> bool:
    """What the shell gave as other bytes comes as lone surrogates, which nothing here can store or send."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True
