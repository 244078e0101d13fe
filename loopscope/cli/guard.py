"""One clear message in place of a traceback, for everything that is the user's or the machine's to solve."""

from __future__ import annotations

import errno
import functools
import signal
import sys
import warnings
from collections.abc import Callable

REFUSED, INTERRUPTED, TERMINATED = 2, 130, 143


def guarded(command: Callable) -> Callable:
    """Wrap a command: LoopscopeError, a full disk, lack of memory and Ctrl-C end in one line and an exit code."""

    @functools.wraps(command)
    def run(*args, **kwargs):
        from loopscope.errors import LoopscopeError

        # A polite kill must clean up like Ctrl-C does: half a run folder is removed on the way out.
        before = signal.signal(signal.SIGTERM, _terminate)
        said: set[str] = set()

        def show(message, category, *where, **more) -> None:
            if str(message) not in said:  # a run that decodes many prompts says it once
                said.add(str(message))
                sys.stderr.write(f"warning: {message}\n")

        try:
            if command.__name__ in _ALONE:
                from loopscope.cli.shared import only_alone

                only_alone(command.__name__.replace("_", "-"))
            with warnings.catch_warnings():
                warnings.showwarning = show
                return command(*args, **kwargs)
        except KeyboardInterrupt as stopped:
            _end(str(stopped) or "interrupted; nothing was left behind", INTERRUPTED)
        except LoopscopeError as error:
            _end(f"error: {error}", REFUSED)
        except OSError as error:
            if error.errno not in _DISK:
                raise
            _end(f"error: {error.filename or 'a file'} could not be written: {error.strerror}; free some space or write elsewhere", REFUSED)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "memory" not in str(error).lower():
                raise
            _end("error: not enough memory for this request; use a smaller depth, a shorter prompt or fewer prompts", REFUSED)
        finally:
            signal.signal(signal.SIGTERM, before)

    return run


_ALONE = ("report", "decode", "factorial", "grid", "verify", "gpu_check", "convert", "figures")  # what several processes cannot share
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def _terminate(signum, frame) -> None:
    raise SystemExit(TERMINATED)


def _end(message: str, code: int) -> None:
    import typer

    sys.stdout.flush()
    sys.stderr.write(f"{message}\n")
    raise typer.Exit(code)
