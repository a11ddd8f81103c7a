"""Makes the virtual environment and decides which torch goes into it. Standard library only.

A torch build fits one kind of device, and pip cannot see devices: asked for a pinned version, it replaces a
ROCm build by a CPU one. So the choice is made here, before pip runs, by one pure function (`choose`), and
checked after pip has run (`verify`): a torch that was there before is still the same one, or this stops.

    python3 exec/env/install.py --torch auto        # what `make pretrain` runs
    python3 exec/env/install.py --torch rocm        # needs TORCH_INDEX_URL
    python3 exec/env/install.py --dry-run           # says what it would do
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OLDEST = (2, 9)  # pyproject.toml's range, which a test compares with this
STAMP = "nanolearn-install.json"
VENDOR_BUILD = {"nvidia": "cuda", "amd": "rocm"}
PROBE = """
import importlib.metadata, json, sys, sysconfig
found = {"version": importlib.metadata.version("torch"), "in_venv": sys.prefix != sys.base_prefix,
         "paths": sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})}
try:
    import torch
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else ""
    found |= {"version": torch.__version__, "device": device}
    found |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
except Exception as error:
    found["fault"] = str(error).splitlines()[0] if str(error) else type(error).__name__
print(json.dumps(found))
"""


class Refused(Exception):
    """What stops the installation, in one line that says what to do."""


@dataclasses.dataclass(frozen=True)
class Torch:
    """An installed torch, as its own Python reports it. `device` is "cuda" (ROCm too), "mps" or "".

    `fault` is why it can't be imported, or "".
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    device: str = ""
    paths: tuple[str, ...] = ()
    in_venv: bool = False
    fault: str = ""

    @property
    def build(self) -> str:
        """ "rocm", "cuda" or "cpu" (Apple's build is "cpu": its devices need no other wheel)."""
        return "rocm" if self.hip else "cuda" if self.cuda else "cpu"

    def __str__(self) -> str:
        if self.fault:
            return f"torch {self.version}, which can't be imported ({self.fault})"
        return f"torch {self.version} ({self.build} build, sees {self.device or 'no accelerator'})"


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where torch comes from: "keep" an installed one, the "plain" wheel, or an "index" of other builds."""

    source: str
    reason: str
    index_url: str = ""
    pinned: bool = False
    system_site: bool = False
    build: str = ""  # what the installed torch must turn out to be; "" accepts any


def choose(
    wanted: str,
    *,
    inside: Torch | None,
    outside: Torch | None,
    card: str = "",
    platform: str = sys.platform,
    index_url: str = "",
) -> Choice:
    """Which torch to use. `inside` is the environment's own, `outside` that of the Python that makes it.

    A torch inside the environment is never replaced, whatever is wanted: it stays, or this refuses. `card` is
    "nvidia", "amd" or "". `index_url` is what the person gave in TORCH_INDEX_URL.
    """
    if inside:
        return _keep_inside(wanted, inside, card)
    if wanted == "system" or (wanted == "auto" and outside and outside.device):
        return _keep_outside(outside)
    if wanted == "auto":
        wanted = VENDOR_BUILD.get(card, "cpu")
    if wanted == "cpu":
        reason = "no accelerator was found, or none is wanted"
        return Choice("index" if index_url else "plain", reason, index_url, pinned=not index_url)
    if platform == "darwin":
        raise Refused(f"torch has no {wanted} build for macOS: TORCH=auto brings the one that sees Apple's GPU")
    if not index_url and (wanted == "rocm" or not platform.startswith("linux")):
        raise Refused(
            f"pip's default index has no {wanted} build of torch for this system: set TORCH_INDEX_URL to the "
            f"index URL that pytorch.org's install page shows for your {wanted.upper()}, or use TORCH=cpu"
        )
    return Choice("index" if index_url else "plain", f"a {wanted} build", index_url, build=wanted)


def _keep_inside(wanted: str, inside: Torch, card: str) -> Choice:
    needed = wanted if wanted in ("cuda", "rocm") else ""
    if wanted == "auto" and not inside.device:
        needed = VENDOR_BUILD.get(card, "")
    if inside.fault or needed not in ("", inside.build):
        needed = f"a {needed} build" if needed else "a working one"
        otherwise = ", or keep it with TORCH=cpu" if wanted == "auto" and not inside.fault else ""
        raise Refused(
            f"the environment holds {inside}, but {needed} is needed: "
            f"delete the environment and run this again{otherwise}"
        )
    return Choice("keep", f"already in the environment: {_recent(inside)}")


def _keep_outside(outside: Torch | None) -> Choice:
    if outside is None or outside.fault:
        found = f"holds {outside}" if outside else "has no torch"
        raise Refused(f"{sys.executable} {found}: install one there, or use TORCH=auto")
    return Choice("keep", f"already installed: {_recent(outside)}", system_site=True)


def _recent(torch: Torch) -> Torch:
    found = tuple(int(part) for part in re.findall(r"\d+", torch.version)[:2])
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Refused(f"{torch} is older than {oldest}: upgrade it there, or use another with TORCH=cpu|cuda|rocm")
    return torch


def pip_commands(choice: Choice, python: str, constraints: Path, extras: list[str]) -> list[list[str]]:
    """The pip calls, in order. Never `--extra-index-url`: of two indexes, pip takes the higher version."""
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    project = [*pip, "-c", str(constraints), "-e", str(ROOT) + (f"[{','.join(extras)}]" if extras else "")]
    if choice.source != "index":
        return [project]
    # No constraints here: an index of torch builds keeps only some versions of what torch needs.
    return [[*pip, "--index-url", choice.index_url, "torch>=" + ".".join(map(str, OLDEST))], project]


def constraints_for(choice: Choice, pins: str) -> str:
    """constraints.txt as pip is to see it: its line for torch only where the pinned torch is the choice."""
    lines = pins.splitlines(keepends=True)
    return "".join(line for line in lines if choice.pinned or not line.startswith("torch=="))


def probe(python: Path | str) -> Torch | None:
    """The torch that `python` imports, or None. Costs that Python an import of torch: seconds."""
    try:
        done = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    fields = json.loads(done.stdout.splitlines()[-1])
    return Torch(**{**fields, "paths": tuple(fields["paths"])})


def find_card() -> str:
    """ "nvidia" or "amd" where the vendor's own tool lists a device, else "".

    /dev/kfd alone is no sign: the kernel makes it for the small graphics units of AMD's laptops too.
    """
    for vendor, command, sign in (("nvidia", ["nvidia-smi", "-L"], "GPU "), ("amd", ["rocminfo"], "gfx")):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and sign in done.stdout:
            return vendor
    return ""


def make_environment(venv: Path, choice: Choice, outside: Torch | None) -> None:
    """Create `venv`; with system site packages where the torch to keep lies outside it."""
    flags = ["--system-site-packages"] if choice.system_site else []
    done = subprocess.run([sys.executable, "-m", "venv", *flags, str(venv)], capture_output=True, text=True)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1]
        raise Refused(f"{sys.executable} could not make {venv}: {last}")
    if choice.system_site and outside and outside.in_venv:
        # "System" is the base Python's; a torch in another virtual environment has to be pointed at.
        inner = subprocess.run(
            [_python(venv), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        (Path(inner) / "nanolearn_outside.pth").write_text("\n".join(outside.paths) + "\n")


def verify(before: Torch | None, after: Torch | None, choice: Choice) -> str:
    """One line about the installed torch; Refused if it is not the one that was chosen."""
    if after is None or after.fault:
        raise Refused(f"pip ended well, but found {after}: delete the environment and run this again")
    if choice.source == "keep" and before and (before.version, before.build) != (after.version, after.build):
        raise Refused(f"{before} was to be kept, but {after} is used: `pip list -v` shows where it comes from")
    if choice.build and after.build != choice.build:
        raise Refused(f"a {choice.build} build was asked for, but pip brought {after}: check TORCH_INDEX_URL")
    return str(after)


def install(wanted: str, extras: list[str], venv: Path, dry_run: bool) -> None:
    """Bring `venv` to what pyproject.toml and constraints.txt say; a second call finds its stamp, returns."""
    pins = (ROOT / "constraints.txt").read_text()
    digest = hashlib.sha256((pins + (ROOT / "pyproject.toml").read_text()).encode()).hexdigest()
    stamp = _stamp(venv)
    wanted = stamp["wanted"] if wanted == "auto" and stamp else wanted
    extras = sorted({*extras, *stamp.get("extras", [])})
    wish = {"digest": digest, "wanted": wanted, "extras": extras}
    if stamp == wish:
        return
    inside, outside = probe(_python(venv)), probe(sys.executable)
    index_url = os.environ.get("TORCH_INDEX_URL", "")
    choice = choose(wanted, inside=inside, outside=outside, card=find_card(), index_url=index_url)
    constraints = venv / "constraints.txt"
    commands = pip_commands(choice, _python(venv), constraints, extras)
    print(f"torch: {choice.source}, {choice.reason}", flush=True)
    for command in commands:
        print("+", shlex.join(command), flush=True)
    if dry_run:
        return
    if inside is None:
        make_environment(venv, choice, outside)
    constraints.write_text(constraints_for(choice, pins))
    for command in commands:
        if subprocess.run(command).returncode:
            raise Refused("pip failed, its last lines above say why; finished downloads are kept: run this again")
    print("installed:", verify(inside or outside, probe(_python(venv)), choice))
    (venv / STAMP).write_text(json.dumps(wish))


def _python(venv: Path) -> str:
    return str(venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def _stamp(venv: Path) -> dict:
    path = venv / STAMP
    return json.loads(path.read_text()) if path.exists() and Path(_python(venv)).exists() else {}


def main(arguments: list[str] | None = None) -> int:
    """The command line: 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", choices=["auto", "cpu", "cuda", "rocm", "system"], default="auto")
    parser.add_argument("--extras", default="", help="comma-separated: book, chat, dev, trackers")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--dry-run", action="store_true", help="print the choice and pip's commands, run none")
    given = parser.parse_args(arguments)
    try:
        install(given.torch, [e for e in given.extras.split(",") if e], given.venv.resolve(), given.dry_run)
    except Refused as refused:
        print(f"install: {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
