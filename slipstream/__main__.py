"""``slipstream`` and ``python -m slipstream``: the command line, quiet when it is interrupted, from the imports on."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_INTERRUPTED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def main() -> None:
    """Entry point of the ``slipstream`` command."""
    _reopen_closed_streams()
    was_interrupted = False

    def leave(*_: object) -> NoReturn:
        os._exit(_INTERRUPTED)  # there is nothing to clean up while modules are imported

    def interrupt(*_: object) -> NoReturn:
        nonlocal was_interrupted
        was_interrupted = True
        raise KeyboardInterrupt

    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in a shell's background
    if is_interruptible:
        signal.signal(signal.SIGINT, leave)
    from .cli import main as run

    if is_interruptible:
        signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        run()
    except Exception:
        if not was_interrupted:  # libraries turn an interrupt into errors of their own
            raise
        sys.exit(_INTERRUPTED)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM ends as Ctrl-C does: half-written folders are removed."""
    sys.exit(_TERMINATED)


def _reopen_closed_streams() -> None:
    """Give closed standard streams a number's place, so that no file opened later is taken for stdout or stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


if __name__ == "__main__":
    main()
