"""What this machine is, and what follows from it: the device, its memory, the dtype, whether to compile.

Everything that asks "which device?" asks here, once, and gets a `Machine`: plain data, so that a plan for
eight H100s can be made, and tested, on a laptop. NANOLEARN_SIMULATE="8 x NVIDIA H100 80GB HBM3" replaces
the real query; what is simulated says so wherever it is printed. ROCm calls its devices "cuda": `hip` tells
them apart, never the capability (an MI300X reports 9.4 and has been taken for a Hopper). A choice carries
the reason that is printed.
"""

import importlib.util
import os
import re
import shutil
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanolearn import devices, host
from nanolearn.devices import device_memory as device_memory
from nanolearn.devices import peak_flops as peak_flops
from nanolearn.errors import UserError

SIMULATE = "NANOLEARN_SIMULATE"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Choice:
    """A value and the reason that is printed with it."""

    value: object
    reason: str


@dataclass(frozen=True)
class Machine:
    """The devices that a run may use: `count` alike, the first with number `index`.

    memory is bytes per device (the host's for a CPU and for Apple's GPUs, which share it).

    >>> Machine(type="cuda", name="NVIDIA H100 80GB HBM3", count=8).label
    '8 x NVIDIA H100 80GB HBM3'
    """

    type: str  # "cpu", "cuda" (ROCm too) or "mps"
    name: str
    count: int = 1
    memory: int = 0
    capability: tuple[int, int] | None = None
    hip: str | None = None
    cuda: str | None = None
    arch: str | None = None
    simulated: bool = False
    index: int = 0

    @property
    def vendor(self) -> str:
        """ "cpu", "apple", "amd" or "nvidia"."""
        return {"cpu": "cpu", "mps": "apple"}.get(self.type, "amd" if self.hip else "nvidia")

    @property
    def label(self) -> str:
        """How the machine is printed."""
        several = f"{self.count} x {self.name}" if self.count > 1 else self.name
        return f"{several} (simulated)" if self.simulated else several


def detect() -> Machine:
    """The machine this process runs on, or the one that NANOLEARN_SIMULATE names.

    Devices of another kind than the first are left out: ranks of unequal speed wait for the slowest.
    Raises UserError for a simulated name that the table doesn't hold. Taught in chapter 06_mfu.
    """
    if wanted := os.environ.get(SIMULATE, "").strip():
        return replace(named(wanted), simulated=True)
    if torch.cuda.is_available() and torch.cuda.device_count():
        return _detect_cuda()
    if torch.backends.mps.is_available():
        return Machine(type="mps", name=host.processor(), memory=host.memory())
    return cpu()


def cpu() -> Machine:
    """The host's processor as a machine: one device, whatever its number of cores."""
    return Machine(type="cpu", name=host.processor(), memory=host.memory())


def _detect_cuda() -> Machine:
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    alike = 1
    while alike < len(found) and found[alike].name == found[0].name:
        alike += 1
    first = found[0]
    hip = torch.version.hip
    # gcnArchName is "gfx942:sramecc+:xnack-": the part before the colon names the architecture.
    arch = first.gcnArchName.split(":")[0] if hip else f"sm_{first.major}{first.minor}"
    return Machine(
        type="cuda",
        name=first.name,
        count=alike,
        memory=min(p.total_memory for p in found[:alike]),
        capability=(first.major, first.minor),
        hip=hip,
        cuda=torch.version.cuda,
        arch=arch,
    )


def named(name: str, count: int = 1) -> Machine:
    """A machine from the table of devices, for plans: "NVIDIA H100 80GB HBM3", or "8 x MI300X".

    Raises UserError, with the nearest names, for a device that the table lacks.

    >>> named("8 x MI300X").label, named("AMD Instinct MI300X").arch
    ('8 x MI300X', 'gfx942')
    """
    counted = re.fullmatch(r"(\d+)\s*x\s+(.+)", name.strip())
    if counted:
        count, name = int(counted[1]), counted[2]
    if count < 1:
        raise UserError(f"{count} devices", "give 1 or more")
    device = devices.find(name)
    if device is None:
        raise devices.near(name)
    amd = device.vendor == "amd"
    return Machine(
        type="cuda",
        name=name.strip(),
        count=count,
        memory=device_memory(name) or 0,
        capability=_capability(device.arch),
        hip="from the table" if amd else None,
        cuda=None if amd else "from the table",
        arch=device.arch,
    )


def _capability(arch: str) -> tuple[int, int]:
    """What torch reports: sm_90 is (9, 0); ROCm gives gfx942 as (9, 4) and gfx90a as (9, 0).

    >>> _capability("sm_120"), _capability("gfx942"), _capability("gfx90a")
    ((12, 0), (9, 4), (9, 0))
    """
    digits = arch.removeprefix("sm_")
    return (int(arch[3]), int(arch[4])) if arch.startswith("gfx") else (int(digits[:-1]), int(digits[-1]))


def select(machine: Machine, wanted: str = "auto") -> Machine:
    """The part of a machine that a person asked for: "auto", "cpu", "mps", "cuda", "cuda:1" or ROCm's
    "hip".

    Raises UserError when the machine hasn't got it. Numbers are the host's, so that selecting twice is selecting once.

    >>> one = select(named("8 x MI300X"), "hip:1")
    >>> one.label, one.index, select(one, "hip:1") == one
    ('MI300X', 1, True)
    """
    if wanted == "auto":
        return machine
    found = re.fullmatch(r"(cpu|mps|cuda|hip)(?::(\d+))?", wanted)
    if not found:
        raise UserError(f"device {wanted!r}", "give auto, cpu, mps, cuda, hip, or one device as in cuda:1")
    kind, index = found[1].replace("hip", "cuda"), found[2]
    if kind == "cpu":
        return machine if machine.type == "cpu" else cpu()
    if kind != machine.type:
        raise UserError(f"device {wanted!r} is not on this machine ({machine.label})", "give auto or cpu")
    if index is None or kind == "mps":
        return machine
    last = machine.index + machine.count - 1
    if not machine.index <= int(index) <= last:
        raise UserError(f"device {wanted!r} of {machine.label}", f"give {machine.index} to {last}")
    return replace(machine, count=1, index=int(index))


def torch_device(machine: Machine, local_rank: int = 0) -> torch.device:
    """The torch device of one rank.

    >>> torch_device(named("8 x H100"), local_rank=3)
    device(type='cuda', index=3)
    """
    if machine.type != "cuda":
        return torch.device(machine.type)
    return torch.device("cuda", machine.index + local_rank)


def choose_dtype(machine: Machine, wanted: str = "auto") -> Choice:
    """The dtype of activations, as torch's name for it, and why.

    bfloat16 where the hardware multiplies it, float16 with loss scaling on older cards, float32 elsewhere.
    Raises UserError for an unknown dtype or one the device can't multiply. Taught in chapter 06_mfu.

    >>> choose_dtype(named("H100")).value, choose_dtype(named("T4")).value
    ('bfloat16', 'float16')
    """
    best = _best_dtype(machine)
    if wanted == "auto":
        return best
    dtype = DTYPES.get(wanted, wanted)
    if dtype not in DTYPES.values():
        raise UserError(f"dtype {wanted!r}", f"give auto, {', '.join(DTYPES.values())}")
    if machine.type == "cuda" and dtype == "bfloat16" and best.value != "bfloat16":
        raise UserError(f"{machine.name} has no bfloat16", f"give dtype=auto, which chooses {best.value}")
    if machine.type == "cpu" and dtype == "float16":
        raise UserError("a CPU has no fast float16", "give dtype=auto (float32) or dtype=bfloat16")
    scaling = ", with loss scaling" if dtype == "float16" else ""
    return Choice(dtype, f"asked for{scaling} (the choice here would be {best.value})")


def _best_dtype(machine: Machine) -> Choice:
    if machine.type != "cuda":
        which = "a CPU" if machine.type == "cpu" else "an Apple GPU"
        return Choice("float32", f"the safe one: nobody measured here what 16 bits gain on {which}")
    if machine.hip:
        arch = machine.arch or ""
        if re.match(r"gfx(908|90a|94|95|11|12)", arch):
            return Choice("bfloat16", f"{arch} multiplies it in its matrix units")
        if arch == "gfx906":
            return Choice("float16", f"{arch} has no bfloat16 units; loss scaling keeps small gradients")
        return Choice("float32", f"{arch or 'this AMD device'} is not known to multiply 16 bits fast")
    capability = machine.capability or (0, 0)
    said = ".".join(map(str, capability))
    if capability >= (8, 0):
        return Choice("bfloat16", f"capability {said} multiplies it in tensor cores")
    if capability >= (7, 0):
        return Choice("float16", f"capability {said} has no bfloat16; loss scaling keeps small gradients")
    return Choice("float32", f"capability {said} has no tensor cores")


def float8_dtype(machine: Machine) -> str | None:
    """The 8-bit float that the matrix units take, or None: by architecture, because the two kinds differ.

    gfx942 has FNUZ (largest value 240); later AMD, and NVIDIA from 8.9 on, OCP's (448). bfloat16 stays the
    default.

    >>> float8_dtype(named("MI300X")), float8_dtype(named("H100")), float8_dtype(named("A100"))
    ('float8_e4m3fnuz', 'float8_e4m3fn', None)
    """
    if machine.hip:
        arch = machine.arch or ""
        return "float8_e4m3fnuz" if arch.startswith("gfx94") else "float8_e4m3fn" if arch >= "gfx95" else None
    capable = machine.type == "cuda" and (machine.capability or (0, 0)) >= (8, 9)
    return "float8_e4m3fn" if capable else None


def choose_compile(machine: Machine, wanted: bool | str = "auto") -> Choice:
    """Whether the model is compiled, and why: "auto" compiles on CUDA and ROCm where `can_compile` finds all it needs.

    >>> choose_compile(cpu()).reason
    'eager: compiling costs minutes here, ask for it with compile=True'

    Taught in chapter 06_mfu.
    """
    if wanted is False:
        return Choice(False, "eager: compile=False was asked for")
    return can_compile(machine, asked=wanted is True)


def can_compile(machine: Machine | None = None, asked: bool = False) -> Choice:
    """Whether torch.compile can work here, and why: it needs a C++ compiler, Python's headers, on a GPU
    Triton.

    False off a GPU unless it was asked for: compiling takes minutes there. Never raises: eager always
    works.

    >>> can_compile(cpu()).value
    False
    """
    machine = machine or detect()
    if machine.type != "cuda" and not asked:
        return Choice(False, "eager: compiling costs minutes here, ask for it with compile=True")
    missing = _compile_needs(machine.type)
    if missing:
        return Choice(False, f"eager: torch.compile needs {', '.join(missing)}")
    return Choice(True, "torch.compile: compiler, headers and code generator found")


def _compile_needs(kind: str) -> list[str]:
    compilers = [os.environ.get("CXX", ""), "g++", "clang++", "cl"]
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    needs = {
        "a C++ compiler": any(shutil.which(name) for name in compilers if name),
        "setuptools": importlib.util.find_spec("setuptools") is not None,
        "Python's headers (python3-dev)": headers.exists(),
        "Triton": kind != "cuda" or importlib.util.find_spec("triton") is not None,
    }
    return [name for name, found in needs.items() if not found]
