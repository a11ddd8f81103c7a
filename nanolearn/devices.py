"""What makers say of each accelerator: peak FLOP/s, memory, architecture; found by the name that torch shows.

MFU is a share of a peak, so a wrong peak makes a wrong MFU: public trainers have shown 104%, 152%, 563%, 0%
and -100% because a name matched in part, two dies were counted as one, or an unknown card got a default. So
here whole words are compared, the entry with most words wins, a word that marks another chip (Ti, Laptop,
MIG) forbids a match, and whatever is not in the table has no peak: then no MFU is shown. Chapter 06_mfu
teaches the numbers.

A peak is units x FLOPs per clock and unit x clock in GHz, dense, with fp32 accumulation, or "datasheet"
where only the product is published. `units` of an AMD MI250X are those of one die: torch shows each die as
a device.
Memory bandwidths are datasheet values throughout, an MI250X's again those of one die.
"""

import difflib
import re
from dataclasses import dataclass

from nanolearn.errors import UserError

TERA = 1e12


@dataclass(frozen=True)
class Device:
    """One line of the table.

    `tflops` is the dense 16-bit peak; memory sizes are the maker's, in 10^9 bytes. The first memory size holds when
    the device's name tells none of the others. Real devices show up to 7% more (a maker's "80 GB" is 80 x 2^30 bytes
    less a reserve), so a plan made from a name errs on the small side. `bandwidth` is that of the memory in TB/s
    (10^12), the datasheet's, one for each memory size; empty where no datasheet could be named: then there is no
    roofline.
    """

    name: str
    tflops: float
    memory: tuple[int, ...]
    arch: str
    bandwidth: tuple[float, ...] = ()
    bf16: bool = True
    source: str = "datasheet"

    @property
    def words(self) -> frozenset[str]:
        return words(self.name)

    @property
    def vendor(self) -> str:
        return "amd" if self.arch.startswith("gfx") else "intel" if self.arch == "pvc" else "nvidia"


def derived(
    name: str,
    units: int,
    per_clock: int,
    ghz: float,
    memory: tuple[int, ...],
    arch: str,
    bandwidth: tuple[float, ...] = (),
    bf16: bool = True,
) -> Device:
    """A line whose peak is a product that can be checked.

    >>> round(derived("H100", 132, 4096, 1.830, (80,), "sm_90").tflops, 1)
    989.4
    """
    source = f"{units} units x {per_clock} FLOPs x {ghz} GHz"
    return Device(name, units * per_clock * ghz / 1e3, memory, arch, bandwidth, bf16, source)


TABLE = (
    # Hopper. Plain names are SXM modules: torch says "NVIDIA H100 80GB HBM3" for one, and names PCIe and NVL.
    derived("H100", 132, 4096, 1.830, (80,), "sm_90", (3.35,)),
    Device("H100 PCIe", 756.0, (80,), "sm_90", (2.0,)),
    Device("H100 NVL", 835.0, (94,), "sm_90", (3.9,)),
    derived("H200", 132, 4096, 1.830, (141,), "sm_90", (4.8,)),
    Device("H200 NVL", 835.0, (141,), "sm_90", (4.8,)),
    derived("GH200", 132, 4096, 1.830, (96, 144), "sm_90", (4.0, 4.9)),
    derived("H800", 132, 4096, 1.830, (80,), "sm_90", (3.35,)),
    Device("H800 PCIe", 756.0, (80,), "sm_90", (2.0,)),
    Device("H800 NVL", 835.0, (94,), "sm_90"),
    Device("H20", 148.0, (96,), "sm_90", (4.0,)),
    # Ampere
    derived("A100", 108, 2048, 1.410, (40, 80), "sm_80", (1.555, 2.039)),
    derived("A100 PCIe", 108, 2048, 1.410, (40, 80), "sm_80", (1.555, 1.935)),
    derived("A800", 108, 2048, 1.410, (40, 80), "sm_80", (1.555, 2.039)),
    derived("A800 PCIe", 108, 2048, 1.410, (40, 80), "sm_80", (1.555, 1.935)),
    derived("A40", 84, 1024, 1.740, (48,), "sm_86", (0.696,)),
    derived("A30", 56, 2048, 1.440, (24,), "sm_80", (0.933,)),
    derived("A10", 72, 1024, 1.695, (24,), "sm_86", (0.600,)),
    derived("RTX A6000", 84, 1024, 1.800, (48,), "sm_86", (0.768,)),
    derived("RTX 3090", 82, 512, 1.695, (24,), "sm_86", (0.936,)),
    derived("RTX 3090 Ti", 84, 512, 1.860, (24,), "sm_86", (1.008,)),
    # Ada
    derived("RTX 6000 Ada", 142, 1024, 2.505, (48,), "sm_89", (0.960,)),
    Device("L40S", 362.0, (48,), "sm_89", (0.864,)),
    Device("L40", 181.0, (48,), "sm_89", (0.864,)),
    Device("L4", 121.0, (24,), "sm_89", (0.300,)),
    derived("RTX 4090", 128, 512, 2.520, (24,), "sm_89", (1.008,)),
    derived("RTX 4090 D", 114, 512, 2.520, (24,), "sm_89", (1.008,)),
    # Blackwell
    derived("RTX 5090", 170, 512, 2.407, (32,), "sm_120", (1.792,)),
    derived("RTX PRO 6000 Blackwell", 188, 1024, 2.617, (96,), "sm_120", (1.792,)),
    Device("B100", 1800.0, (192,), "sm_100", (8.0,)),
    Device("B200", 2250.0, (192,), "sm_100", (8.0,)),
    Device("GB200", 2500.0, (192,), "sm_100", (8.0,)),
    Device("Grace Blackwell", 2500.0, (192,), "sm_100", (8.0,)),  # another name of the GB200
    Device("B300", 2250.0, (288,), "sm_103", (8.0,)),
    Device("GB300", 2500.0, (288,), "sm_103", (8.0,)),
    # AMD. An MI250X is two devices to torch: 110 of its 220 units each, half of the package's 383.0 TFLOP/s.
    derived("MI300X", 304, 2048, 2.100, (192,), "gfx942", (5.3,)),
    derived("MI325X", 304, 2048, 2.100, (256,), "gfx942", (6.0,)),
    derived("MI300A", 228, 2048, 2.100, (128,), "gfx942", (5.3,)),
    derived("MI350X", 256, 4096, 2.200, (288,), "gfx950", (8.0,)),
    derived("MI355X", 256, 4096, 2.400, (288,), "gfx950", (8.0,)),
    derived("MI250X", 110, 1024, 1.700, (64,), "gfx90a", (1.638,)),
    Device("MI250", 181.05, (64,), "gfx90a", (1.638,), source="half of the package's 362.1"),
    # Without BF16: the peak is FP16's.
    derived("V100", 80, 1024, 1.530, (16, 32), "sm_70", (0.9, 0.9), bf16=False),
    Device("V100 PCIe", 112.0, (16, 32), "sm_70", (0.9, 0.9), bf16=False),
    derived("T4", 40, 1024, 1.590, (16,), "sm_75", (0.320,), bf16=False),
)
INTEL_MAX = frozenset({"max", "1550"})  # its peak depends on how many compute units the driver shows
# A word beside a known name that makes it another chip, a part of one, or one held to less power.
OTHER_CHIP = frozenset({"ti", "super", "d", "laptop", "mobile", "max-q", "mig", "grid"})


def words(name: str) -> frozenset[str]:
    """The words of a device's name, lower case, split at spaces and hyphens ("Max-Q" stays one).

    >>> sorted(words("NVIDIA A100-SXM4-80GB"))
    ['80gb', 'a100', 'nvidia', 'sxm4']
    """
    return frozenset(re.findall(r"max-q|[^\s\-]+", name.lower()))


def find(name: str) -> Device | None:
    """The table's line for a device name, or None when there is none: never the nearest guess.

    >>> find("NVIDIA L40S").tflops, find("AMD Instinct MI300X VF").name, find("NVIDIA RTX A4000")
    (362.0, 'MI300X', None)

    Taught in chapter 06_mfu.
    """
    found = words(name)
    fitting = [d for d in TABLE if d.words <= found and not (found - d.words) & OTHER_CHIP]
    return max(fitting, key=lambda d: len(d.words), default=None)


def peak_flops(name: str, dtype: str = "bfloat16", compute_units: int | None = None) -> float | None:
    """Peak dense FLOP/s of one device as torch shows it, or None: unknown device, a CPU, a dtype it hasn't.

    dtype is "bfloat16" or "float16"; the table has no other. compute_units is needed for Intel's Data
    Center GPU Max alone. Taught in chapter 06_mfu.

    >>> f"{peak_flops('NVIDIA H100 80GB HBM3'):.4g}", peak_flops("Tesla T4"), peak_flops("cpu")
    ('9.894e+14', None, None)
    """
    if words(name) >= INTEL_MAX:
        return 512 * compute_units * 1300e6 if compute_units and dtype == "bfloat16" else None
    device = find(name)
    if device is None or dtype not in ("bfloat16", "float16") or (dtype == "bfloat16" and not device.bf16):
        return None
    return device.tflops * TERA


def device_memory(name: str) -> int | None:
    """Bytes of memory of one device by its name, or None when the name isn't in the table.

    >>> device_memory("NVIDIA A100-SXM4-80GB"), device_memory("AMD Instinct MI300X")
    (80000000000, 192000000000)
    """
    device = find(name)
    return device.memory[_variant(device, name)] * 10**9 if device else None


def device_bandwidth(name: str) -> float | None:
    """Bytes a second that one device's memory moves, or None: unknown device, or no figure that could be named.

    >>> device_bandwidth("NVIDIA A100-SXM4-80GB"), device_bandwidth("AMD Instinct MI300X"), device_bandwidth("cpu")
    (2039000000000.0, 5300000000000.0, None)

    Taught in chapter 06_mfu.
    """
    device = find(name)
    if device is None or not device.bandwidth:
        return None
    return round(device.bandwidth[_variant(device, name)] * 1e3) * 1e9


def _variant(device: Device, name: str) -> int:
    """Which of a device's memory sizes its name tells; the first where it tells none."""
    said = {int(number) for number in re.findall(r"\b(\d+)gb?\b", name.lower())}
    return next((number for number, size in enumerate(device.memory) if size in said), 0)


def near(name: str) -> UserError:
    """The error for a name that a person typed and the table lacks, with the nearest names it has.

    >>> print(near("4090"))
    device '4090' is not in the table: did you mean RTX 4090, RTX 4090 D, L40?
    """
    by_lower = {d.name.lower(): d.name for d in TABLE}
    alike = difflib.get_close_matches(" ".join(name.lower().split()), by_lower, n=3, cutoff=0.4)
    names = [by_lower[word] for word in alike] or list(by_lower.values())
    remedy = f"did you mean {', '.join(names)}?" if alike else f"give one of {', '.join(names)}"
    return UserError(f"device {name!r} is not in the table", remedy)
