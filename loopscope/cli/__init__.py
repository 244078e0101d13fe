"""The command line. `loopscope --help` imports neither torch nor pandas: commands import what they need when they run."""

from __future__ import annotations

import sys


def main() -> None:
    """The `loopscope` command. Exit codes: 0 done, 2 refused (one message on stderr), 130 interrupted."""
    try:
        from loopscope.cli.app import app

        app(prog_name="loopscope")
    except KeyboardInterrupt:  # before a command began
        sys.stderr.write("interrupted\n")
        sys.exit(130)
