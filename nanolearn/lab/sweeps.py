"""Results of longer sweeps, recorded beside the notebooks: a chapter shows them, and computes them anew when asked.

A record holds what it was computed from, the machine, the date and the package's commit, so that a figure can say where
its points come from. A record of other settings than the chapter's is refused, not shown.
"""

import datetime
import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nanolearn import hardware
from nanolearn.errors import UserError
from nanolearn.fetch import replacing
from nanolearn.paths import home


@dataclass(frozen=True)
class Recorded:
    """A sweep's values as JSON gives them back, and one sentence that says where and when."""

    values: Any
    about: str


def recorded(chapter: str, compute: Callable[[], Any], fresh: bool, settings: Mapping[str, Any]) -> Recorded:
    """The record of a chapter's sweep, `notebooks/results/CHAPTER.json`; with `fresh` it is computed and written.

    `compute()` returns plain JSON values. Raises UserError where no record is there, or one of other `settings`.

    Taught in chapter 00_model.
    """
    path = home() / "notebooks" / "results" / f"{chapter}.json"
    if fresh:
        found = {
            "settings": dict(settings),
            "date": datetime.date.today().isoformat(),
            "machine": hardware.detect().label,
            "commit": _commit(),
            "values": compute(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside:
            aside.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"there is no record of {chapter}'s sweep ({path})", "give fresh=True") from None
    if found["settings"] != json.loads(json.dumps(dict(settings))):
        raise UserError(f"the record of {chapter}'s sweep has other settings", "give fresh=True, or leave them alone")
    return Recorded(found["values"], f"Recorded on {found['date']} on {found['machine']}.")


def _commit() -> str:
    """The checkout's commit; "" outside of one."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=home(), capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()
