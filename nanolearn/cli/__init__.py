"""The command line: `nanolearn doctor | plan | data | run | join`.

What a person can cause ends in one line and exit code 2, an interrupt in 130, a refused plan in 1, a run that was
stopped and can go on in 75. Everything heavy is imported where it is used, so that --help answers at once. Each
command is a module here.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from nanolearn.cli import data, doctor, join, plan, run
from nanolearn.errors import UserError

USER_ERROR, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    >>> main(["plan", "--depth", "0"])
    2
    """
    options = parser().parse_args(arguments)
    try:
        return options.command(options)
    except UserError as error:
        print(f"nanolearn: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    """The whole command line.

    >>> parser().parse_args(["plan", "--depth", "24"]).depth
    24
    """
    top = argparse.ArgumentParser(prog="nanolearn", description="Pre-train a GPT, and know beforehand what it takes.")
    commands = top.add_subparsers(title="commands", required=True, metavar="doctor | plan | data | run | join")
    for command in (doctor, plan, data, run, join):
        command.add(commands)
    return top
