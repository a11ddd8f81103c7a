"""What a chapter that measures begins with: the machine, and sizes that fit it.

A chapter is the same notebook on a laptop and on eight accelerators: only its sizes differ. It names each of them once,
with a value for each preset; `preset` chooses the column and `overrides` replaces single values, by their own types.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pydantic import create_model

from nanolearn import hardware
from nanolearn.errors import UserError
from nanolearn.hardware import Choice, Machine
from nanolearn.overrides import parse
from nanolearn.presets import PRESETS, choose_preset

COLUMNS = ("laptop", "gpu", "full")  # the order in which a chapter gives the three values of a size


@dataclass(frozen=True)
class Settled:
    """A chapter's machine, its preset with the reason for it, its seed and its sizes."""

    machine: Machine
    preset: Choice
    seed: int
    sizes: SimpleNamespace


def settle(settings: Mapping[str, Any], **sizes: tuple[Any, Any, Any]) -> Settled:
    """Turn a chapter's checked parameters (`preset`, `seed`, `overrides`) into its sizes, and say them in one line.

    Each size is given as its values for the laptop, gpu and full preset. Raises UserError for an unknown preset or
    override, naming the nearest one, and for a value of another type.

    >>> settings = {"preset": "laptop", "seed": 0, "overrides": "rows=64"}
    >>> settle(settings, rows=(8, 16, 32), buffer=(100, 1000, 1000)).sizes
    preset laptop (asked for): rows=64 buffer=100
    namespace(rows=64, buffer=100)

    Taught in chapter 07_pretrain.
    """
    machine = hardware.detect()
    preset = choose_preset(machine, settings["preset"])
    values = {name: three[COLUMNS.index(str(preset.value))] for name, three in sizes.items()}
    declared: Any = {name: (type(value), value) for name, value in values.items()}
    wishes = parse(settings["overrides"], create_model("Sizes", **declared).model_fields)
    for name, value in wishes.items():
        if type(value) in (int, float) and value <= 0:
            raise UserError(f"override {name}={value}", "give a number greater than 0")
    values |= wishes
    print(f"preset {preset.value} ({preset.reason}): {' '.join(f'{name}={value}' for name, value in values.items())}")
    return Settled(machine, preset, settings["seed"], SimpleNamespace(**values))


assert set(COLUMNS) == set(PRESETS)
