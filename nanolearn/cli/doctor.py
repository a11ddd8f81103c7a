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
    command.add_argument("--full", action="store_true", help="also measure devices, links and disks: up to 3 minutes")
    command.add_argument("--depth", type=int, default=4, help="of the run that --full ends with (default: %(default)s)")
    command.add_argument("--overrides", default="", help='of that run: "ratio=8 num_devices=4"')
    command.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from nanolearn import doctor

    checks = doctor.examine(options.online)
    print(*checks, sep="\n", flush=True)
    if options.full:
        checks += _measured(options)
    return ILL if any(check.remedy for check in checks) else 0


def _measured(options: argparse.Namespace) -> list:
    from nanolearn import measure
    from nanolearn.hardware import detect
    from nanolearn.recipe import build

    machine = detect()
    recipe, execution = build(options.depth, "auto", "auto", 0, options.overrides, machine)
    found = []
    for check in measure.examine(recipe, execution, machine, options.online):
        print(check, flush=True)
        found.append(check)
    return found
