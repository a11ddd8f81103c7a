"""One accelerator in five minutes: is the model right on it, and how fast does it learn?

`python bench/device.py` needs torch, numpy and this repository, nothing else: no download, no other package. Tokens
are random, so the loss means nothing; the work is that of a real run. First every way of attention is compared with
float64 and with plain fp32 attention; a way that is wrong is not timed. Then the full preset's shape at depths 24 and
12, each way eager in bf16, and the fastest one compiled at depth 24. It stops in time with what it has, prints a
table and leaves bench/results/device-NAME.json. The row without windows is another model, there to show what windows
save. It has not been run on an accelerator; `--tiny` runs all of it on a CPU in a minute.
"""

import argparse
import datetime
import gc
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from nanolearn import devices, flops
from nanolearn.data.batch import Batch
from nanolearn.data.prefetch import Prefetcher
from nanolearn.model import gpt as model_code
from nanolearn.model.attention import attend
from nanolearn.model.gpt import GPT, GPTConfig
from nanolearn.model.kernels import source
from nanolearn.model.materialize import materialize
from nanolearn.optim.optimizer import Optimizer, Rates

RESULTS = Path(__file__).parent / "results"
RATES = Rates(0.02, 0.3, 0.15, 0.008, 0.5, 0.005, 0.2, 0.28)  # the full preset's: timing needs them to be usual only
FULL_MEMORY = 0.85  # of the device: from there on twice the rows can't fit
LAST_STEPS = 45  # seconds before the end in which no further configuration is begun

# The rounding of one number, relative: 2^-24 and 2^-9. An output is a mean of values, weighted by probabilities that
# are rounded too, from scores that were summed in fp32: a few roundings of the largest value. Gradients pass through
# twice as many products. fp32 has more room since kernels are free to sum in another order, or as three TF32 products.
ATTENTION_TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2**-5}
# Nats of one target, root mean square: a logit of about 1 is the end of 4 layers that round to 2^-9 several times each;
# attention that sees other keys moves it by about 1.
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
COMPILED_TOLERANCE = 0.02  # nats of the mean loss: the same roundings at other places, over thousands of targets

BF16, BOTH = (torch.bfloat16,), (torch.float32, torch.bfloat16)
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Size:
    """How large the measurement is."""

    batches: dict[int, int]  # depths, and the tokens of a step of the full preset there
    head_dim: int
    sequence_len: int
    vocab_size: int
    most_rows: int
    budget: float  # seconds, of all
    timed: float  # seconds of timed steps in a line of the table
    backend: str = "inductor"

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(self.batches)

    def config(self, depth: int, window: str) -> GPTConfig:
        width = -(-64 * depth // self.head_dim) * self.head_dim
        heads = width // self.head_dim
        return GPTConfig(depth, width, heads, heads, self.head_dim, self.sequence_len, self.vocab_size, window)


FULL = Size({24: 2**20, 12: 2**19}, 128, 2048, 32768, most_rows=128, budget=300.0, timed=5.0)
TINY = Size(
    {2: 4096, 1: 4096}, 64, 512, 512, most_rows=2, budget=58.0, timed=0.5, backend="aot_eager"
)  # inductor's C++ takes minutes


@dataclass(frozen=True)
class Way:
    """One way to attend: its name, its windows, the function, and the dtypes that it takes."""

    name: str
    window: str
    attend: Attend
    dtypes: tuple[torch.dtype, ...] = BOTH


def present(device: str) -> tuple[Way, ...]:
    """Every way of attention whose code is here, the likely fastest first; last the model without windows."""
    kernels = [name for name in ("flash3", "flash2", "flex") if source(name) not in ("", "kernels")]
    kernels = kernels if device == "cuda" else []  # "kernels" would download: nothing is, here
    ways = [
        Way(name, "SSSL", partial(attend, backend=name), BF16 if name.startswith("flash") else BOTH)
        for name in (*kernels, "blocked", "sdpa")
    ]
    return (*ways, Way("no windows", "L", attend))


def plain(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The definition, in the inputs' dtype: every score, a mask, a softmax. (B, T, H, D) -> (B, T, H, D)."""
    i = torch.arange(q.size(1), device=q.device)
    visible = (i.unsqueeze(0) <= i.unsqueeze(1)) & (i.unsqueeze(1) - i.unsqueeze(0) <= window)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.size(-1) ** 0.5
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def attention_error(attend: Attend, window: int, size: Size, dtype: torch.dtype, device: str) -> float:
    """The largest difference from float64, of output and gradients, as a share of the largest value there."""
    shape = (1, size.sequence_len, 2, size.head_dim)
    draws = [torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(4)]
    # On the CPU, of the numbers as they were rounded: nothing of the device.
    exact = [t.double().requires_grad_() for t in draws[:3]]
    inputs, push = [t.to(device).requires_grad_() for t in draws[:3]], draws[3].to(device)
    found, wanted = attend(*inputs, window), plain(*exact, window)
    found.backward(push)
    wanted.backward(draws[3].double())
    pairs = [(found, wanted), *((a.grad, b.grad) for a, b in zip(inputs, exact, strict=True))]
    pairs = [(a.detach().double().cpu(), b.detach()) for a, b in pairs]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@contextmanager
def using(attend: Attend) -> Iterator[None]:
    """Models attend in this way meanwhile."""
    before = model_code.attend
    model_code.attend = lambda q, k, v, window, *_: attend(q, k, v, window)
    try:
        yield
    finally:
        model_code.attend = before


def fill(model: GPT, seed: int) -> None:
    """Weights under which every layer matters to the loss (fresh ones hide attention), drawn on the device."""
    generator = torch.Generator(device=model.head.weight.device).manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0.0, p.size(1) ** -0.5, generator=generator)
            else:
                p.fill_(0.5)


def nats(config: GPTConfig, attend: Attend, dtype: torch.dtype, device: str) -> Tensor:
    """The loss of each target of one random row, under `fill`'s weights: the same ones in every dtype and way."""
    model = materialize(config, device, 0, dtype, fill=fill)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (1, config.sequence_len + 1), generator=generator).to(device)
    with using(attend):
        return model.token_nats(tokens[:, :-1], tokens[:, 1:])


def check(way: Way, size: Size, device: str) -> dict:
    """What a way differs by, and "wrong": the comparisons that it fails, in words."""
    config = replace(size.config(size.depths[-1], way.window), n_layer=len("SSSL"))  # narrow, every kind of layer
    reference = nats(config, plain, torch.float32, device)
    said: dict = {"loss_of_reference": float(reference.mean()), "wrong": []}
    for dtype in way.dtypes:
        name = str(dtype).removeprefix("torch.")
        error = attention_error(way.attend, min(config.windows), size, dtype, device)
        apart = float((nats(config, way.attend, dtype, device) - reference).square().mean().sqrt())
        said |= {f"attention_error_{name}": error, f"losses_apart_{name}": apart}
        if not error <= ATTENTION_TOLERANCE[dtype]:
            said["wrong"].append(f"{name} attention is {error:.2g} from float64")
        if not apart <= LOSS_TOLERANCE[dtype]:
            said["wrong"].append(f"{name} losses are {apart:.2g} nats from those of plain fp32 attention")
    return said


def random_rows(config: GPTConfig, rows: int) -> Iterator[Batch]:
    """Rows as a loader gives them, of random tokens."""
    generator = torch.Generator().manual_seed(2)
    for number in range(sys.maxsize):
        tokens = torch.randint(config.vocab_size, (rows, config.sequence_len + 1), generator=generator)
        yield Batch(tokens[:, :-1], tokens[:, 1:], row=number * rows, epoch=0)


class Trial:
    """One model on one device, and its steps: rows in, forward, backward, optimizer."""

    def __init__(self, config: GPTConfig, device: str) -> None:
        self.device = torch.device(device)
        self.config, self.model = config, materialize(config, device, 0, torch.bfloat16, fill=fill)
        self.optimizer, self.loss_sum = Optimizer(self.model, RATES), self.model.loss_sum

    def compile(self, backend: str) -> None:
        self.loss_sum = torch.compile(self.model.loss_sum, backend=backend)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, batch: Batch) -> float:
        """One micro-batch and one update; the update's seconds, with `wait` before and after it."""
        nats = self.loss_sum(batch.inputs, batch.targets)
        self.optimizer.expect()
        (nats / batch.targets.numel()).backward()
        self.wait()
        began = time.perf_counter()
        self.optimizer.collect()
        self.optimizer.step(1.0, 0.95, 1.0)
        self.wait()
        updated = time.perf_counter() - began
        self.optimizer.zero_grad()
        self.nats = nats.detach() / batch.targets.numel()
        return updated

    def eager_loss(self, rows: int) -> float:
        """Mean nats of the rows that `once` begins with, without a compiler."""
        batch = next(random_rows(self.config, rows))
        with torch.no_grad():
            return (
                float(self.model.loss_sum(batch.inputs.to(self.device), batch.targets.to(self.device)))
                / batch.targets.numel()
            )

    def once(self, rows: int) -> float | None:
        """Seconds of one step, or None where its rows don't fit."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # else `used` is still that of the configuration before
        fits, began = True, time.perf_counter()
        try:
            with Prefetcher(random_rows(self.config, rows), self.device) as batches:
                self.step(next(batches))
                self.wait()
        except torch.OutOfMemoryError:
            fits = False
        if not fits:  # only now: the error held on to every tensor of the step
            self.optimizer.zero_grad()
            release(self.device)
        return time.perf_counter() - began if fits else None

    def used(self) -> float:
        """Share of the device's memory at the highest point; 0 where torch doesn't count it."""
        if self.device.type != "cuda":
            return 0.0
        return torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(self.device).total_memory

    def timed(self, rows: int, seconds: float, batch_tokens: int) -> dict:
        """Speed, stall and memory over `seconds`, after one step to warm up.

        Each micro-batch here is followed by an update, so both are timed; the speed is that of a run, where an update
        follows `batch_tokens`, as many micro-batches as one device would take for them.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with Prefetcher(random_rows(self.config, rows), self.device) as batches:
            self.step(next(batches))
            self.wait()
            began, stalled, steps, updating = time.perf_counter(), batches.stall_seconds, 0, 0.0
            while steps < 2 or time.perf_counter() - began < seconds:
                updating += self.step(next(batches))
                steps += 1
            passed, stall = time.perf_counter() - began, batches.stall_seconds - stalled
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        micro_batch, update = (passed - updating) / steps, updating / steps
        tokens = rows * self.config.sequence_len
        batch_tokens = max(batch_tokens, tokens)
        speed = batch_tokens / (batch_tokens / tokens * micro_batch + update)
        return {
            "rows": rows, "steps": steps, "seconds_a_micro_batch": micro_batch, "seconds_an_update": update,
            "batch_tokens": batch_tokens, "tokens_per_second": speed,
            "peak_memory_bytes": peak, "stall_share": stall / passed,
        }  # fmt: skip


def release(device: torch.device) -> None:
    """Give back what no tensor holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def shape(model: GPT) -> flops.Shape:
    """What the counts need, read from the built model."""
    config, groups = model.config, model.config.parameter_groups()
    return flops.Shape(
        model.matmul_parameters(), sum(groups.values()), groups["token_table"] + groups["value_tables"], 0,
        config.n_layer, config.n_head, config.head_dim, config.n_embd, config.sequence_len, config.windows,
    )  # fmt: skip


def fitting_rows(trial: Trial, most: int, deadline: float) -> tuple[int, float]:
    """The most rows at once, a power of two, that fit, and the seconds of the very first step (at one row)."""
    rows, first = 0, 0.0
    while rows < most and time.perf_counter() < deadline:
        seconds = trial.once(max(1, 2 * rows))
        if seconds is None:
            break
        rows, first = max(1, 2 * rows), first or seconds
        if trial.used() > FULL_MEMORY:
            break
    return rows, first


def measure(way: Way, depth: int, size: Size, device: str, peak: float | None, deadline: float, rows: int = 0) -> dict:
    """One line of the table; given `rows`, the compiled one."""
    compiled = rows > 0
    about = {"way": way.name, "depth": depth, "compiled": compiled}

    def failed(why: str) -> dict:
        return about | {"failed": why}

    with using(way.attend):
        trial = Trial(size.config(depth, way.window), device)
        if compiled:
            trial.compile(size.backend)
            expected, first = trial.eager_loss(rows), trial.once(rows)
            if first is None:
                return failed("the rows that fit without a compiler do not fit with it")
            if not (apart := abs(float(trial.nats) - expected)) <= COMPILED_TOLERANCE:
                return failed(f"its loss is {apart:.2g} nats from the same model's without a compiler")
        else:
            rows, first = fitting_rows(trial, size.most_rows, deadline)
        if not rows or first is None:
            return failed("one row does not fit")
        said = {**about, "first_step_seconds": first} | trial.timed(
            rows, min(size.timed, max(0.0, deadline - time.perf_counter())), size.batches[depth]
        )
    for name in ("canonical", "palm"):
        said[f"mfu_{name}"] = flops.mfu(flops.per_token(shape(trial.model), name), said["tokens_per_second"], peak)
    return said


class Report:
    """What is known so far, and its way out: also when the time is up in the middle of a step."""

    def __init__(self, folder: Path, name: str, command: str, about: dict) -> None:
        self.folder, self.name, self.command, self.about = folder, name, command, about
        self.checks: dict[str, dict] = {}
        self.lines: list[dict] = []
        self.notes: list[str] = []
        self.began, self.written = time.perf_counter(), threading.Lock()

    def row(self, line: dict) -> str:
        """A line of the table."""
        if "failed" in line:
            figures = line["failed"]
        else:
            gb = "-" if line["peak_memory_bytes"] is None else f"{line['peak_memory_bytes'] / 1e9:.1f}"
            shares = [
                "-" if line[f"mfu_{n}"] is None else f"{100 * line[f'mfu_{n}']:.1f}%" for n in ("canonical", "palm")
            ]
            figures = (
                f"{line['rows']:>4} {line['tokens_per_second']:>9,.0f} {shares[0]:>6} {shares[1]:>6} {gb:>6}"
                f" {line['first_step_seconds']:>7.1f} {100 * line['stall_share']:>6.2f}%"
            )
        way = line["way"] + (", compiled" if line["compiled"] else "")
        return f"{line['depth']:>5}  {way:<38} {figures}"

    def write(self) -> Path:
        """The table on the screen, the JSON file; the second caller waits for ever, since the first one ends it."""
        self.written.acquire()
        print(f"\n{self.about['device']}, bf16, {self.about['torch']}; peak {self.about['peak_tflops'] or 'unknown'}")
        print(f"depth  {'attention':<38} rows     tok/s    MFU   PaLM     GB  first s  stall")
        print("\n".join(map(self.row, self.lines)))
        print("\n".join(self.notes))
        figures = {
            "checks": self.checks, "lines": self.lines, "notes": self.notes,
            "seconds": round(time.perf_counter() - self.began, 1),
        }  # fmt: skip
        record = {
            "date": datetime.date.today().isoformat(), "command": self.command, "machine": self.about,
            "figures": figures,
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"device-{self.name}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path, flush=True)
        return path

    def time_is_up(self) -> None:
        """Called from another thread: torch may be inside a compile that nothing can interrupt."""
        self.notes.append("the time was up in the middle of a configuration: that one is missing")
        self.write()
        os._exit(1)


def best(lines: list[dict], depth: int, ways: Sequence[Way]) -> dict | None:
    """The fastest eager line of the model that is trained, with its windows."""
    windowed = {way.name for way in ways if "S" in way.window}
    lines = [line for line in lines if line["depth"] == depth and line["way"] in windowed and "rows" in line]
    return max(lines, key=lambda line: line["tokens_per_second"], default=None)


def go(report: Report, size: Size, device: str, peak: float | None) -> None:
    """Checks, then every configuration in the order of its worth, as long as there is time."""
    deadline = report.began + size.budget - LAST_STEPS * size.budget / 300
    ways = present(device)
    for way in ways:
        try:
            said = check(way, size, device)
        except Exception as error:  # a kernel without code for this device is a finding, not the end
            said = {"wrong": [f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"]}
        report.checks[way.name] = said
        report.notes += [f"{way.name} is wrong, and not timed: {fault}" for fault in said["wrong"]]
        print(f"{way.name}: {'WRONG' if said['wrong'] else 'right'}", flush=True)

    def add(way: Way, depth: int, until: float, rows: int = 0) -> None:
        if time.perf_counter() > until:
            report.notes.append(f"no time was left for depth {depth}, {way.name}{', compiled' if rows else ''}")
            return
        try:
            line = measure(way, depth, size, device, peak, until, rows)
        except Exception as error:  # a kernel or a compiler that this device lacks is a finding, not the end
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            line = {"way": way.name, "depth": depth, "compiled": rows > 0, "failed": said[:200]}
        report.lines.append(line)
        print(report.row(line), flush=True)
        release(torch.device(device))

    right = [way for way in ways if not report.checks[way.name]["wrong"]]
    for depth in size.depths:
        for way in right:
            add(way, depth, report.began + 0.55 * size.budget)
    chosen = best(report.lines, size.depths[0], ways)
    if chosen is not None:
        add(next(way for way in ways if way.name == chosen["way"]), size.depths[0], deadline, chosen["rows"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a very small model, on the CPU, in a minute")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    options = parser.parse_args(argv)
    if not options.tiny and not torch.cuda.is_available():
        print("torch sees no CUDA or ROCm device: give --tiny to try the script on a CPU")
        return 2
    device, size = ("cpu", TINY) if options.tiny else ("cuda", FULL)
    label = "cpu" if options.tiny else torch.cuda.get_device_name()
    peak = None if options.tiny else devices.peak_flops(label)
    about = {
        "device": label, "peak_tflops": peak and peak / 1e12, "python": platform.python_version(),
        "torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
    }  # fmt: skip
    name = "tiny" if options.tiny else re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    report = Report(options.out, name, f"python bench/device.py{' --tiny' if options.tiny else ''}", about)
    guard = threading.Timer(size.budget - 2, report.time_is_up)
    guard.daemon = True
    guard.start()
    go(report, size, device, peak)
    guard.cancel()
    report.write()
    return 1 if any(said["wrong"] for said in report.checks.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
