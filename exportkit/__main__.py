"""Starts the ``exportkit`` command. Ctrl-C ends it at any time with exit code 130 and without a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

_INTERRUPTED = 130  # 128 and the number of SIGINT, as shells count


def main() -> None:
    """Runs the ``exportkit`` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as it is under nohup
        signal.signal(signal.SIGINT, _interrupt)
    from exportkit import cli

    cli.app()


def _interrupt(*_: Any) -> None:
    """Removes unfinished files and ends the process.

    A KeyboardInterrupt would have to pass through libraries that turn it into an ImportError, swallow it, or abort the
    process, above all while they are being imported (seen in transformers 5.23 and torch 2.13).
    """
    with contextlib.suppress(BaseException):  # modules may be loaded by half
        if "exportkit.files" in sys.modules:
            sys.modules["exportkit.files"].remove_unfinished()
        if "exportkit.commands.shared" in sys.modules:
            sys.modules["exportkit.commands.shared"].stderr.show_cursor()  # which a progress bar hides
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
