"""`nanolearn plan`: what a run needs and costs, before it starts."""

import argparse

from nanolearn.errors import UserError

REFUSED = 1


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command.

    >>> parser = argparse.ArgumentParser()
    >>> add(parser.add_subparsers())
    >>> parser.parse_args(["plan", "--depth", "24"]).depth
    24

    Taught in chapter 07_pretrain.
    """
    command = commands.add_parser("plan", help="say what a run needs and costs, before it starts")
    command.description = (
        "Prints parameters, tokens, memory, hours, cost and disk of a run. Exit code 1 if it is refused. "
        'Example: nanolearn plan --depth 24 --gpus 8 --device "NVIDIA H100 80GB HBM3" --ratio 8'
    )
    command.add_argument(
        "--depth", type=int, default=4, help="layers; with the preset it decides the rest (default: %(default)s)"
    )
    command.add_argument("--preset", default="auto", help="auto, full, gpu or laptop (default: by the device)")
    command.add_argument(
        "--device", metavar="NAME", help="plan for this device, as torch names it (default: this machine's)"
    )
    command.add_argument(
        "--gpus", type=int, metavar="N", help="how many of them (default: 1 named, or all that are here)"
    )
    command.add_argument("--data", default="auto", help="the corpus (default: by the preset)")
    command.add_argument("--ratio", metavar="R", help="tokens for each weight of blocks and head")
    command.add_argument("--overrides", default="", help='any other number: "window=L micro_batch=8"')
    command.add_argument("--price", metavar="DOLLARS", help="of one device for an hour")
    command.add_argument(
        "--mfu", type=float, metavar="SHARE", help="the share of the peak that you expect, such as 0.4"
    )
    command.add_argument("--json", action="store_true", help="for machines")
    command.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> int:
    from nanolearn.hardware import detect, named
    from nanolearn.plan import make_plan
    from nanolearn.recipe import build

    machine = named(options.device, 1 if options.gpus is None else options.gpus) if options.device else detect()
    asked = {"ratio": options.ratio, "price": options.price, "num_devices": options.gpus}
    wishes = [options.overrides, *(f"{name}={value}" for name, value in asked.items() if value is not None)]
    recipe, execution = build(options.depth, options.preset, options.data, 0, " ".join(wishes), machine)
    if options.mfu is not None and not 0 < options.mfu <= 1:
        raise UserError(f"--mfu {options.mfu:g}", "give a share of the peak, such as 0.4")
    plan = make_plan(recipe, execution, machine, mfu=options.mfu)
    print(plan.to_json() if options.json else plan.text())
    return 0 if plan.finishes else REFUSED
