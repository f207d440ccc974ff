"""The `quantkit` command: how errors and signals end it.

All but signals is imported within `main`, which takes long enough for a user to change their mind.
"""

import atexit
import os
import signal
import sys
from typing import NoReturn

from quantkit.leaving import NUMBERS, handle, leave
from quantkit.signals import raise_again, terminate, wait_no_longer


def main() -> None:
    """Run the command line. A `QuantkitError` is one message and its exit code, never a traceback.

    SIGINT, SIGTERM and SIGHUP are one line and the exit code 128 + number, from the first instruction to the
    last. A closed pipe is exit code 1, without a word.
    """
    handle(leave)
    # The last of what runs at exit. Signals would then end the process without the exit code of what it did.
    atexit.register(handle, signal.SIG_IGN)
    from quantkit.cli.app import app
    from quantkit.cli.collector import leave_all

    atexit.register(leave_all)

    unraisable = sys.unraisablehook
    try:
        try:
            sys.unraisablehook = raise_again
            handle(terminate)
            app()
        finally:
            handle(leave)
            wait_no_longer()
    except BaseException as error:
        # A signal may have come before the other handler was there.
        handle(leave)
        _end(error)
    finally:
        sys.unraisablehook = unraisable
        _flush()


def _end(error: BaseException) -> NoReturn:
    """Say what went wrong, and exit; bugs are raised."""
    from quantkit.cli.console import err, fail
    from quantkit.errors import OtherRankFailed, QuantkitError, causes, explained
    from quantkit.escaping import one_line

    if isinstance(error, QuantkitError):
        # Of an `OtherRankFailed` the other rank says what was wrong.
        if not isinstance(error, OtherRankFailed):
            fail(explained(error))
        sys.exit(error.exit_code)
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else getattr(error, "code", None)
    if code not in {128 + number for number in NUMBERS}:
        raise error
    advice = [note for one in causes(error) for note in getattr(one, "__notes__", ())]
    err.print(one_line("; ".join(("interrupted", *advice))))
    sys.exit(code)


def _flush() -> None:
    """Flush stdout now: if its reader is gone, the interpreter would complain of it while it ends."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
