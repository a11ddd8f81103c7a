"""Which attention a machine can run, and which it will: one look and one trial call at the start, said aloud.

Three questions, in this order. May the device run it at all? Lists answer that, and ROCm is asked before the
capability: an MI300X reports 9.4 and is no Hopper. Is the code there? The import system answers without importing. Does
it work? One call answers, forward and backward, with the run's dtype, head size and window, against plain attention in
higher precision: a kernel that loads may still hold no code for this device. Nothing is chosen that failed, and nothing
that was asked for is replaced.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanolearn.errors import UserError
from nanolearn.hardware import Machine, torch_device
from nanolearn.model.attention import BACKENDS, attend
from nanolearn.model.gpt import GPTConfig
from nanolearn.model.kernels import SOURCES, source
from nanolearn.model.windows import CAUSAL, way, window_mask

# What the kernels' own pages name: Hopper for FlashAttention 3; Ampere, Ada and Hopper, and on ROCm MI200 to MI350, for
# FlashAttention 2 (github.com/Dao-AILab/flash-attention).
HOPPER = {(9, 0)}
AMPERE_TO_HOPPER = {(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)}
INSTINCT = {"gfx90a", "gfx942", "gfx950"}
# Error as a share of the largest value: a few roundings of one number, as in bench/device.py.
TOLERANCE = {"float64": 1e-10, "float32": 5e-5, "bfloat16": 2**-5, "float16": 2**-8}
FAST, PORTABLE = ("flash3", "flash2", "flex"), ("blocked", "sdpa")


@dataclass(frozen=True)
class Need:
    """What a model asks of attention: dtype by torch's name, heads, and each layer's window of `sequence_len`."""

    dtype: str
    n_head: int
    n_kv_head: int
    head_dim: int
    sequence_len: int
    windows: tuple[int, ...]

    @property
    def full(self) -> bool:
        """Whether every layer sees everything."""
        return min(self.windows) >= self.sequence_len - 1


def need(config: GPTConfig, dtype: str) -> Need:
    """What a model of this shape asks.

    >>> need(GPTConfig(2, 32, 2, 1, 16, 512, 64), "float32").windows
    (128, 512)
    """
    return Need(dtype, config.n_head, config.n_kv_head, config.head_dim, config.sequence_len, config.windows)


@dataclass(frozen=True)
class Found:
    """What the probe found of one backend. `works`: None where it was not tried."""

    backend: str
    works: bool | None
    said: str

    def __str__(self) -> str:
        return f"{self.backend}: {'not tried' if self.works is None else 'works' if self.works else 'no'} ({self.said})"


@dataclass(frozen=True)
class Attending:
    """The chosen backend, the reason that is printed with it, and all that was found on the way."""

    backend: str
    reason: str
    found: tuple[Found, ...]


def choose(machine: Machine, need: Need, wanted: str = "auto", trying: bool = True) -> Attending:
    """Pick the backend of a run: the one that was asked for, or the best that passes its trial.

    Without `trying`, and on a simulated machine, no device is touched: lists and installed packages decide. Raises
    UserError where the one that was asked for can't run, naming those that can. Taught in chapter 05_attention.

    >>> choose(Machine("cpu", "a processor"), Need("float32", 2, 2, 8, 16, (16,))).backend
    'blocked'
    """
    if wanted != "auto":
        return _asked(machine, need, wanted, trying)
    order: tuple[str, ...] = (*FAST, "blocked") if machine.type == "cuda" else ("blocked",)
    if machine.type == "cuda" and need.full:
        order = ("flash3", "sdpa")  # without windows torch's own kernel does what flash2 does
    found: list[Found] = []
    for backend in order:
        found.append(examine(backend, machine, need, asked=False, trying=trying))
        if found[-1].works is not False:
            break
    last = found[-1]
    if last.works is False:
        raise RuntimeError(f"attention by {last.backend}, which runs everywhere, is wrong here: {last.said}")
    others = "".join(f"; {one}" for one in found[:-1])
    return Attending(last.backend, f"{last.backend} on {_where(machine)}: {last.said}{others}", tuple(found))


def _asked(machine: Machine, need: Need, wanted: str, trying: bool) -> Attending:
    if wanted not in BACKENDS:
        raise UserError(f"attention={wanted}", f"give auto, {', '.join(BACKENDS)}")
    found = examine(wanted, machine, need, trying=trying)
    if found.works is False:
        others = (name for name in BACKENDS if name != wanted)
        good = [name for name in others if examine(name, machine, need, False, trying).works is not False]
        raise UserError(f"attention={wanted}: {found.said}", f"give auto, or what works here: {', '.join(good)}")
    return Attending(wanted, f"{wanted}: asked for; {found.said}", (found,))


def survey(machine: Machine, need: Need) -> tuple[Found, ...]:
    """Every backend, tried. Taught in chapter 05_attention.

    >>> found = survey(Machine("cpu", "a processor"), Need("float32", 2, 2, 8, 16, (16,)))
    >>> [one.backend for one in found if one.works]
    ['sdpa', 'blocked']
    """
    return tuple(examine(backend, machine, need, asked=False) for backend in BACKENDS)


def examine(backend: str, machine: Machine, need: Need, asked: bool = True, trying: bool = True) -> Found:
    """One backend: may it, is it there, does it work? `asked`: by name, so that it may be fetched from a hub."""
    if no := barred(backend, machine, need):
        return Found(backend, False, no)
    if backend in SOURCES and not machine.simulated:
        module = source(backend)
        if not module:
            return Found(backend, False, f"none of {', '.join(SOURCES[backend])} is installed")
        if module == "kernels" and not asked:
            return Found(backend, False, f"{SOURCES[backend][module]} is only downloaded for attention={backend}")
    if machine.simulated or not trying:
        why = "simulated: if it is installed there" if machine.simulated else "the run itself tries it"
        return Found(backend, None, why)
    from_where = f"{SOURCES[backend][source(backend)]}, " if backend in SOURCES else ""
    wrong, error = trial(backend, need, torch_device(machine))
    said = wrong or f"{from_where}forward and backward tried, {error:.0e} of the largest value from plain attention"
    return Found(backend, not wrong, said)


def barred(backend: str, machine: Machine, need: Need) -> str:
    """Why the lists rule a backend out on a machine; "" where they don't.

    >>> from nanolearn.hardware import named
    >>> need = Need("bfloat16", 2, 2, 128, 2048, (512, 2048))
    >>> barred("flash3", named("H100"), need), "AMD" in barred("flash3", named("MI300X"), need)
    ('', True)

    Taught in chapter 05_attention.
    """
    if backend in PORTABLE:
        return ""
    if machine.type != "cuda":
        return "FlexAttention has no backward here" if backend == "flex" else "needs a GPU of NVIDIA or AMD"
    if backend == "flex":
        return ""
    if need.dtype not in ("bfloat16", "float16"):
        return f"takes 16-bit numbers, not {need.dtype}"
    if machine.hip:  # first: a capability means nothing here
        if backend == "flash3":
            return f"{machine.arch} is AMD's, and FlashAttention 3 is written for NVIDIA's Hopper"
        return "" if machine.arch in INSTINCT else f"{machine.arch} is not on its list ({', '.join(sorted(INSTINCT))})"
    listed = HOPPER if backend == "flash3" else AMPERE_TO_HOPPER
    if machine.capability in listed:
        return ""
    said, names = (", ".join(f"{a}.{b}" for a, b in sorted(some)) for some in ([machine.capability or (0, 0)], listed))
    return f"capability {said} is not on its list ({names})"


def trial(backend: str, need: Need, device: torch.device) -> tuple[str, float]:
    """One call, forward and backward, on an odd length beyond the shortest window: what is wrong ("" if nothing), and
    the largest error as a share of the largest value.

    >>> trial("blocked", Need("float32", 4, 2, 8, 64, (8,)), torch.device("cpu"))[0]
    ''
    """
    window = min(need.windows)
    T = max(1, min(need.sequence_len, 2 * window + 129))
    heads, dtype = need.n_head // need.n_kv_head, getattr(torch, need.dtype)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, T, n, need.head_dim) for n in (heads, 1, 1, heads)]
    draws = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    q, k, v = (t.to(device).requires_grad_() for t in draws[:3])
    try:
        y = attend(q, k, v, window, backend)
        got = [y, *torch.autograd.grad(y, (q, k, v), draws[3].to(device))]
        got = [t.detach().cpu().double() for t in got]
    except Exception as problem:  # a kernel fails in its own words, and of many types
        told = (str(problem).strip().splitlines() or [""])[0][:160]
        return f"its trial call failed: {type(problem).__name__}: {told}", math.inf
    q, k, v, upstream = draws
    wanted = plain(q, k, v, upstream, window, torch.float64 if need.dtype == "float64" else torch.float32)
    largest = max(float(b.abs().max()) for b in wanted)  # one for all: of a single key, the gradients are zeros
    error = max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True)) / largest
    allowed = TOLERANCE[need.dtype]
    return ("" if error <= allowed else f"its trial call is {error:.1g} off, {allowed:.1g} is allowed"), error


def plain(
    q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, window: int, wide: torch.dtype = torch.float64
) -> list[Tensor]:
    """Attention by its definition, every score, in a wider dtype: the output and the gradients of q, k, v, in float64.

    >>> one = torch.ones(1, 1, 1, 1)
    >>> [t.item() for t in plain(one, one, 5 * one, one, window=1)]
    [5.0, 0.0, 0.0, 1.0]
    """
    inputs = [t.detach().to(wide).requires_grad_() for t in (q, k, v)]
    group = q.size(2) // k.size(2)
    keys, values = (t.repeat_interleave(group, 2) for t in inputs[1:])
    scores = torch.einsum("bihd,bjhd->bhij", inputs[0], keys) / math.sqrt(q.size(3))  # (B, H, T_q, T_k)
    seen = window_mask(q.size(1), k.size(1), window, k.size(1) - q.size(1), q.device)
    y = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
    return [t.detach().double() for t in (y, *torch.autograd.grad(y, inputs, upstream.to(wide)))]


def _where(machine: Machine) -> str:
    if machine.type != "cuda":
        return {"cpu": "a CPU", "mps": "Apple's GPU"}[machine.type]
    return f"{machine.arch}, ROCm" if machine.hip else f"capability {'.'.join(map(str, machine.capability or ()))}"


def describe(backend: str, sequence_len: int, windows: Sequence[int]) -> str:
    """What a model's layers do under a backend, in one line.

    >>> describe("blocked", 256, (128, 128, 128, 256))
    "torch's scaled_dot_product_attention: 3 layers masked whole (window 128 of 256), 1 layer causal"

    Taught in chapter 05_attention.
    """
    parts = []
    for window, layers in sorted(Counter(windows).items()):
        how = way(sequence_len, sequence_len, window)
        if how != CAUSAL:
            how = how if backend == "blocked" else "masked whole" if backend == "sdpa" else "in the kernel"
            how = f"{how} (window {window} of {sequence_len})"
        parts.append(f"{layers} {'layer' if layers == 1 else 'layers'} {how}")
    by = "torch's scaled_dot_product_attention" if backend in PORTABLE else backend
    return f"{by}: {', '.join(parts)}"
