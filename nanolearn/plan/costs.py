"""What a run costs besides memory: hours, money, downloads, disk, tokenising.

Every figure rests on an assumption that is stated beside it: a share of the peak that others have reached,
a price that somebody paid, a rate that was measured once. Where there is nothing to stand on the answer is
None, never a guess.
"""

import math
from dataclasses import dataclass

import torch

from nanolearn import host
from nanolearn.data.files import ROWS
from nanolearn.data.sources import open_source
from nanolearn.devices import find
from nanolearn.execution import Execution
from nanolearn.flops import per_token
from nanolearn.hardware import Machine
from nanolearn.model.gpt import GPTConfig
from nanolearn.optim.muon import POLAR_EXPRESS
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import GROUP

# Share of the bf16 peak that a plan assumes, until this code has been measured there.
AMD_MFU = (0.275, "what another trainer of this model reached on one MI300X")
HOPPER_MFU = (0.50, "what another trainer of this model reached on 8 H100s")
OTHER_MFU = (0.35, "assumed for a device that nobody measured")
CPU_SHARE = (0.40, "of the measured speed of matrix products, optimizer included")
# Dollars for one device for an hour.
PRICES = {"H100": (3.50, "an eighth of a node at $28"), "MI300X": (2.00, "a common rental price")}
TOKEN_TEXT = 4.1  # bytes of text: ClimbMix at 32,768 entries; 3.935 measured on the embedded corpus at 4,096
# Bytes of text a second and core: one thread of bench/results/tokenizer.json. That more threads do as much each is
# assumed: on that machine's two busy cores a second thread gained nothing.
TOKENISE_RATE = 2.2e6
TOKENISE_CORES = ROWS // GROUP  # a batch of texts has no more groups to hand out
CORES_BESIDE = 8  # a device, where the machine is only named
EMBEDDED_DOWNLOAD = 9_400_000


@dataclass(frozen=True)
class Speed:
    """How fast training is expected to go, and on what that rests. None: nothing known."""

    tokens_per_second: float | None
    mfu: float | None
    basis: str

    def hours(self, tokens: int) -> float | None:
        """Hours for that many tokens.

        >>> Speed(1000.0, None, "measured").hours(3_600_000)
        1.0
        """
        return tokens / self.tokens_per_second / 3600 if self.tokens_per_second else None


def muon_flops(config: GPTConfig) -> float:
    """FLOPs of one Muon step: five quintics, each two products of s x s x l and one of s x s x s, a matrix.

    Nothing at a batch of a million tokens, a third of the work at 2,048: plans for CPUs count it.

    >>> f"{muon_flops(GPTConfig(4, 256, 4, 4, 64, 256, 4096)):.3g}"
    '2.01e+10'

    Taught in chapter 08_muon.
    """
    width, queries = config.n_embd, config.n_head * config.head_dim
    keys = config.n_kv_head * config.head_dim
    shapes = [(queries, width), (keys, width), (keys, width), (width, queries), (4 * width, width), (width, 4 * width)]
    each = sum(4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3 for s in shapes)
    return float(len(POLAR_EXPRESS) * each * config.n_layer)


def measure(machine: Machine) -> float | None:
    """FLOP/s of matrix products, measured now, where no peak is published: CPUs, and Apple's GPU if it is this one.

    >>> from nanolearn.hardware import named
    >>> measure(named("H100")) is None
    True
    """
    if machine.type == "cpu":
        return host.measure_flops()
    here = machine.type == "mps" and torch.backends.mps.is_available()
    return host.measure_flops(device="mps") if here else None


def speed(
    recipe: Recipe,
    execution: Execution,
    machine: Machine,
    dtype: str,
    world: int,
    mfu: float | None = None,
    cpu_flops: float | None = None,
) -> Speed:
    """Expected tokens a second of `world` devices; `mfu` and `cpu_flops` (of a CPU or of Apple's GPU) replace what is
    assumed and measured.

    Taught in chapter 06_mfu.
    """
    each = per_token(recipe.shape())
    peak = execution.peak(machine, dtype) if machine.type != "cpu" else None
    if machine.type != "cuda" and peak is None and (measured := cpu_flops or measure(machine)):
        share, basis = (mfu, CPU_SHARE[1]) if mfu else CPU_SHARE
        work = each + muon_flops(recipe.gpt_config()) / recipe.batch_tokens
        return Speed(measured * share / work, None, f"{share:.0%} {basis} ({measured / 1e9:.0f} GFLOP/s)")
    if peak is None:
        return Speed(None, None, f"no {dtype} peak is known for {machine.name}: give peak_tflops=NUMBER")
    share, basis = (mfu, "as given") if mfu else _assumed(machine)
    return Speed(peak * world * share / each, share, f"{share:.1%} of {peak / 1e12:.1f} TFLOP/s, {basis}")


def _assumed(machine: Machine) -> tuple[float, str]:
    if machine.hip:
        return AMD_MFU
    return HOPPER_MFU if machine.arch == "sm_90" else OTHER_MFU


def price(execution: Execution, machine: Machine) -> tuple[float | None, str]:
    """Dollars for one device for an hour, and where that comes from; None where nobody said.

    >>> from nanolearn.hardware import named
    >>> price(Execution(), named("NVIDIA H100 80GB HBM3"))
    (3.5, 'stated, not quoted today: an eighth of a node at $28')
    """
    if execution.price:
        return execution.price, "as given"
    device = find(machine.name)
    stated = PRICES.get(device.name) if device else None
    return (stated[0], f"stated, not quoted today: {stated[1]}") if stated else (None, "give price=DOLLARS")


@dataclass(frozen=True)
class Data:
    """What a run needs of its corpus. None: the source can't tell before it is read."""

    present: int | None  # training tokens
    passes: float | None
    download: int | None  # bytes, if nothing is here yet
    token_shards: int  # bytes on disk
    tokenise_hours: float
    cores: int
    tokenise_rate: float = TOKENISE_RATE


def data(recipe: Recipe, machine: Machine, present: int | None = None) -> Data:
    """The corpus of a recipe in numbers; `present` is the exact count of training tokens where it is known.

    Raises UserError for a corpus that doesn't exist.

    >>> from nanolearn.hardware import cpu
    >>> round(data(Recipe.from_depth(4, "laptop"), cpu()).present / 1e6, 1)
    4.0

    Taught in chapter 02_packing.
    """
    source = open_source(recipe.data)
    text = source.size_hint("train")
    if present is None and text is not None:
        present = int(text / TOKEN_TEXT)
    needed = recipe.tokens if present is None else min(recipe.tokens, present)
    elsewhere = machine.simulated or (machine.type == "cuda" and not torch.cuda.is_available())
    cores = min(CORES_BESIDE * machine.count if elsewhere else host.cores(), TOKENISE_CORES)
    return Data(
        present=present,
        passes=recipe.tokens / present if present else None,
        download=_download(recipe.data, source.download_hint, source.tokens_per_shard_hint, needed),
        token_shards=needed * (2 if recipe.vocab_size <= 1 << 16 else 4),
        tokenise_hours=needed * TOKEN_TEXT / TOKENISE_RATE / cores / 3600,
        cores=cores,
    )


def _download(name: str, shard: int | None, shard_tokens: int | None, needed: int) -> int | None:
    if name == "embedded":
        return EMBEDDED_DOWNLOAD
    if shard is None or not shard_tokens:
        return None
    return shard * (math.ceil(needed / shard_tokens) + 1)  # and the validation shard
