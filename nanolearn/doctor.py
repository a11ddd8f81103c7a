"""What this installation can do, and what is wrong with it: one line for a notebook, one page for a person.

Most lost hours begin with an environment: a CPU build of torch on a machine with GPUs, a missing compiler, a full
disk. Each check says what it found and, where it is not well, what to do. Nothing here changes anything, and
nothing asks the network unless told to.
"""

import os
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from nanolearn import devices, hardware, host
from nanolearn.data.hub import KNOWN
from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.hardware import Machine
from nanolearn.model import backends
from nanolearn.paths import cache_dir, home, runs_dir
from nanolearn.presets import PRESETS, choose_preset
from nanolearn.scaling import architecture

LITTLE_DISK = 5e9  # bytes: below, a checkpoint or a corpus will not fit
DRAWN_DEPTH = 4  # one round of the window pattern: what attention is described with where no recipe is settled


@dataclass(frozen=True)
class Check:
    """One line of the page; `remedy` is empty where all is well.

    >>> print(Check("python", "3.11.9"))
    ok   python      3.11.9
    """

    name: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{'LOOK' if self.remedy else 'ok':5}{self.name:12}{self.found}"
        return f"{line}\n{'':17}-> {self.remedy}" if self.remedy else line


def line(machine: Machine | None = None, execution: Execution | None = None) -> str:
    """What runs here, in one line: versions, device, dtype, compilation, attention, each with its reason.

    >>> "torch" in line()
    True

    Taught in chapter 07_pretrain.
    """
    execution = execution or Execution()
    machine = hardware.select(machine or hardware.detect(), execution.device)
    dtype = hardware.choose_dtype(machine, execution.dtype)
    said = (
        f"nanolearn {declared().version}, Python {platform.python_version()}, torch {torch.__version__}",
        f"{machine.label}, {machine.memory / 1e9:.0f} GB",
        f"{dtype.value} ({dtype.reason})",
        hardware.choose_compile(machine, execution.compile).reason,
        f"attention: {_attention(machine, execution.attention)}",
    )
    return " | ".join(said)


@dataclass(frozen=True)
class Declared:
    """What the package says of itself: its version, the Pythons and the packages that it takes."""

    version: str
    python: str
    packages: tuple[str, ...]


def declared() -> Declared:
    """From the installed package, or from pyproject.toml where the checkout itself is imported.

    Raises UserError where there is neither.

    >>> declared().version.count(".") > 0
    True
    """
    try:
        told = metadata.metadata("nanolearn")
        # Extras are left out: nobody has to have them.
        needs = tuple(need for need in metadata.requires("nanolearn") or () if "extra ==" not in need)
        return Declared(told["Version"], told["Requires-Python"], needs)
    except metadata.PackageNotFoundError:
        path = home() / "pyproject.toml"
        if not path.exists():
            raise UserError("nanolearn is not installed", "run `pip install -e .` in its checkout") from None
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        return Declared(project["version"], project["requires-python"], tuple(project["dependencies"]))


def examine(online: bool = False) -> list[Check]:
    """All checks, in the order of the page; `online` also asks the Hugging Face Hub.

    >>> [check.name for check in examine()][:2]
    ['python', 'packages']
    """
    machine = hardware.detect()
    found = [_python(), _packages(), torch_fits(torch_build(), torch.cuda.is_available(), accelerators())]
    found += [_device(machine), _host(), *_disks(), *_choices(machine)]
    return found + ([_hub()] if online else [])


def satisfies(found: str, wanted: str) -> bool:
    """Whether a version lies in a range of >= and <, the only ones that pyproject.toml uses.

    >>> satisfies("2.13.0+cpu", ">=2.9"), satisfies("3.0", "<3,>=2.10"), satisfies("2.9", ">=2.10")
    (True, False, False)
    """

    def parts(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", text.split("+")[0])[:3]]

    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", wanted):
        if (parts(found) < parts(bound)) == (sign == ">="):
            return False
    return True


def _python() -> Check:
    wanted = declared().python
    fits = satisfies(platform.python_version(), wanted)
    return Check("python", f"{platform.python_version()} ({wanted})", "" if fits else f"use Python {wanted}")


def _packages() -> Check:
    """Installed versions against the declared ranges."""
    needs = declared().packages
    wrong = []
    for need in needs:
        name, wanted = re.match(r"([\w.-]+)\s*(.*)", need).groups()  # type: ignore[union-attr]
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if not satisfies(installed, wanted):
            wrong.append(f"{name} {installed} is not {wanted}")
    if wrong:
        return Check("packages", "; ".join(wrong), "install them with `pip install -e .`, which leaves torch alone")
    return Check("packages", f"{len(needs)} in their ranges, torch {torch.__version__}")


def torch_build() -> str:
    """What the installed torch was built for: "rocm", "cuda" or "cpu".

    >>> torch_build() in ("rocm", "cuda", "cpu")
    True
    """
    return "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"


def accelerators() -> set[str]:
    """Vendors of the GPUs that the drivers' own tools list, whatever torch sees.

    >>> accelerators() <= {"nvidia", "amd"}
    True
    """
    found = set()
    for vendor, command, word in (("nvidia", ["nvidia-smi", "-L"], "GPU "), ("amd", ["rocminfo"], "gfx")):
        if shutil.which(command[0]):
            try:
                told = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
            except (OSError, subprocess.TimeoutExpired):
                continue
            if word in told:
                found.add(vendor)
    return found


def torch_fits(build: str, sees: bool, present: set[str]) -> Check:
    """Whether torch's build is the one for the GPUs that are there.

    >>> print(torch_fits("cpu", False, {"nvidia"}).remedy)
    install a cuda build: remove .venv and run make with TORCH=cuda

    Taught in chapter 07_pretrain.
    """
    wanted = {"nvidia": "cuda", "amd": "rocm"}
    right = {wanted[vendor] for vendor in present}
    drivers = " and ".join(sorted(present)) or "no GPU"
    said = f"{build} build, sees {'a' if sees else 'no'} GPU; the drivers list {drivers}"
    if not present or sees:
        return Check("torch", said)
    if build in right:
        return Check("torch", said, "the build is right but it sees nothing: compare its version with the driver's")
    other = " or ".join(sorted(right))
    return Check("torch", said, f"install a {other} build: remove .venv and run make with TORCH={sorted(right)[0]}")


def _device(machine: Machine) -> Check:
    what = f"{machine.label}, {machine.memory / 1e9:.1f} GB each" + (f", {machine.arch}" if machine.arch else "")
    all_cuda = torch.cuda.device_count() if machine.type == "cuda" and not machine.simulated else machine.count
    if all_cuda > machine.count:
        return Check("device", what, f"{all_cuda - machine.count} more of another kind are left out")
    return Check("device", what)


def _host() -> Check:
    return Check(
        "host", f"{host.processor()}, {host.cores()} cores, {host.memory() / 1e9:.1f} GB; {platform.platform()}"
    )


def _disks() -> Iterator[Check]:
    for name, folder in (("cache", cache_dir()), ("runs", runs_dir())):
        there: Path = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        remedy = "" if free > LITTLE_DISK else f"make room, or set NANOLEARN_{name.upper()} to another disk"
        yield Check(name, f"{folder}: {free / 1e9:.1f} GB free", remedy)


def _choices(machine: Machine) -> Iterator[Check]:
    preset, dtype = choose_preset(machine), hardware.choose_dtype(machine)
    yield Check("preset", f"{preset.value} ({preset.reason})")
    eight = hardware.float8_dtype(machine)
    yield Check("dtype", f"{dtype.value} ({dtype.reason}){f'; 8-bit would be {eight}' if eight else ''}")
    device, peak = devices.find(machine.name), hardware.peak_flops(machine.name, str(dtype.value))
    known = (
        f"{peak / 1e12:.1f} TFLOP/s in {dtype.value} ({device.source})"
        if peak and device
        else "unknown: no MFU is shown"
    )
    yield Check("peak", known)
    yield Check("compile", hardware.choose_compile(machine).reason)
    yield Check("attention", _attention(machine))


def _attention(machine: Machine, wanted: str = "auto") -> str:
    preset = str(choose_preset(machine).value)
    config = architecture(DRAWN_DEPTH, PRESETS[preset], {})
    need = backends.need(config, str(hardware.choose_dtype(machine).value))
    # Not tried on a device: a notebook keeps off the devices that its workers will use.
    chosen = backends.choose(machine, need, wanted, trying=machine.type == "cpu")
    said = backends.describe(chosen.backend, need.sequence_len, need.windows)
    return f"{said} (depth {DRAWN_DEPTH} of preset {preset}; {chosen.reason})"


def _hub() -> Check:
    from huggingface_hub import HfApi

    repo = KNOWN["climbmix"].repo
    try:
        HfApi(endpoint=os.environ.get("HF_ENDPOINT")).dataset_info(repo, timeout=10)
    except Exception as problem:  # whatever it is, this page has to go on and say it
        said = (str(problem).strip().splitlines() or [type(problem).__name__])[0][:160]
        return Check("hub", f"{repo} is out of reach ({said})", "set HF_ENDPOINT to a mirror, or use data=embedded")
    return Check("hub", f"{repo} can be read")
