"""`nanolearn doctor`: what this installation can do, and what is wrong with it."""

import argparse

ILL = 1


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command.

    >>> parser = argparse.ArgumentParser()
    >>> add(parser.add_subparsers())
    >>> parser.parse_args(["doctor", "--online"]).online
    True

    Taught in chapter 07_pretrain.
    """
    command = commands.add_parser("doctor", help="say what this installation can do and what is wrong with it")
    command.add_argument("--online", action="store_true", help="also ask whether the Hugging Face Hub can be reached")
    command.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from nanolearn import doctor

    checks = doctor.examine(options.online)
    print(*checks, sep="\n")
    return ILL if any(check.remedy for check in checks) else 0
