"""Pictures and measurements of attention for chapter 05: masks, time and memory by length, who looks where.

Memory on a CPU is what torch's profiler saw allocated, on a GPU what its allocator counted: both are the most that was
held at once, beyond what was there before.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from ipywidgets import IntSlider, VBox
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nanolearn import host
from nanolearn.errors import UserError
from nanolearn.lab import dials, plots
from nanolearn.model import gpt
from nanolearn.model.attention import attend
from nanolearn.model.gpt import GPT
from nanolearn.model.windows import same_document, window_mask

CPU = torch.device("cpu")


def numbered(lengths: Sequence[int]) -> Tensor:
    """Document numbers of one row, (1, T), from its documents' lengths.

    >>> numbered([2, 1]).tolist()
    [[0, 0, 1]]
    """
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths))).unsqueeze(0)


def seen(lengths: Sequence[int], window: int, queries: int | None = None, documents: bool = True) -> Tensor:
    """The mask of a row of documents, (T_q, T): True where a query looks; the queries are the last ones.

    >>> seen([2, 1], window=2).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    ids, T = numbered(lengths)[0], sum(lengths)
    n = queries or T
    near = window_mask(n, T, window, T - n, CPU)
    return near & same_document(ids[-n:], ids) if documents else near


def draw_mask(axes: Axes, mask: Tensor, lengths: Sequence[int], title: str) -> None:
    """One panel: a cell for each query and key, coloured by the key's document where the query looks."""
    ids = numbered(lengths)[0]
    cells = torch.where(mask, ids % len(plots.PALETTE) + 1, 0)
    colours = ListedColormap(["#F2F2F2", *plots.PALETTE])
    first = ids.numel() - mask.size(0)
    extent = (-0.5, ids.numel() - 0.5, ids.numel() - 0.5, first - 0.5)
    axes.imshow(cells.numpy(), cmap=colours, vmin=0, vmax=len(plots.PALETTE), extent=extent, interpolation="nearest")
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(plots.whole_numbers())
    plots.label(axes, title, "key (position)", "query (position)")


def masks_figure(lengths: Sequence[int], window: int) -> Figure:
    """Four masks of one row: full, windowed, with documents, and a chunk of queries after a cache.

    >>> len(masks_figure([3, 5], 2).axes)
    4
    """
    T = sum(lengths)
    fig, axes = plots.figure(2, rows=2, height=3.3)
    draw_mask(axes[0], seen(lengths, T, documents=False), [T], "Full causal")
    draw_mask(axes[1], seen(lengths, window, documents=False), [T], f"Window {window}")
    draw_mask(axes[2], seen(lengths, window), lengths, f"Window {window} and documents")
    chunk = max(1, T // 3)
    draw_mask(axes[3], seen(lengths, window, chunk, documents=False), [T], f"Last {chunk} queries, a cache before")
    return fig


def dial(lengths: Sequence[int], window: int) -> VBox:
    """Two sliders, the window and where the second document begins, that redraw the mask with what it costs."""
    T = sum(lengths)
    wide = IntSlider(window, 0, T - 1, description="window")
    cut = IntSlider(lengths[0], 1, T - 1, description="boundary at")

    def draw(window: int, boundary: int) -> tuple[Figure, str, str]:
        mask = seen([boundary, T - boundary], window)
        fig, (axes,) = plots.figure()
        draw_mask(axes, mask, [boundary, T - boundary], f"{int(mask.sum())} of {T * (T + 1) // 2} causal pairs")
        shown = f"Window {window}, documents of {boundary} and {T - boundary} tokens."
        return fig, shown, f"A mask of {T} queries and keys. {shown}"

    return dials.dial({"window": wide, "boundary": cut}, draw)


def both_ways(backend: str, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, window: int) -> Callable[[], None]:
    """A forward and a backward to measure; inputs need gradients."""

    def work() -> None:
        torch.autograd.grad(attend(q, k, v, window, backend), (q, k, v), upstream)

    return work


def seconds(work: Callable[[], None], device: torch.device, repeats: int = 5) -> list[float]:
    """How long each of `repeats` calls took, after one that warms up; a GPU is waited for."""
    took, wait = [], host.synchroniser(device)
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        work()
        wait()
        took.append(time.perf_counter() - begun)
    return took[1:]


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """The most that was allocated at once while `work` ran, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    if device.type == "mps":
        raise UserError("torch counts no peak of Apple's memory", "measure tensors on the CPU")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    now = top = 0
    told: Any = seen.profiler
    events = [event for event in told.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


def lines_figure(lengths: Sequence[int], times: dict[str, list[float]], memory: dict[str, list[float]]) -> Figure:
    """Time and memory against length, a line for each way; both axes in powers of two."""
    fig, (left, right) = plots.figure(2)
    for axes, lines, unit in ((left, times, "milliseconds"), (right, memory, "megabytes")):
        for name, values in lines.items():
            axes.plot(lengths, values, marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=10)
        axes.set_xticks(list(lengths), [f"{T:,}" for T in lengths])
        axes.tick_params(axis="x", labelsize=8)
        plots.label(axes, "Time" if axes is left else "Memory", "row length (tokens)", unit)
    left.legend(fontsize=8)
    return fig


def errors_figure(errors: dict[str, dict[str, float]], tolerance: dict[str, float]) -> Figure:
    """Largest error by case, a mark for each backend and dtype; `errors` is by "backend, dtype", then by case."""
    fig, (axes,) = plots.figure(height=3.0)
    cases = list(next(iter(errors.values())))
    for number, (name, found) in enumerate(errors.items()):
        axes.plot(list(found.values()), range(len(cases)), "os^vDP"[number % 6], label=name, fillstyle="none")
    for dtype, allowed in tolerance.items():
        axes.axvline(allowed, color=plots.GREY, ls=":")
        axes.text(allowed, -0.62, f" {dtype}", fontsize=8, color=plots.GREY, ha="right")
    axes.set_xscale("log")
    axes.set_yticks(range(len(cases)), cases, fontsize=9)
    axes.set_ylim(len(cases) - 0.5, -0.9)
    plots.label(axes, "Distance from float64", "largest error (share of the largest value)", "")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return fig


def leak_figure(sizes: Sequence[float], leaks: dict[str, list[float]]) -> Figure:
    """How much attention goes to a hidden key, against how low the visible ones score, a line for each fill value."""
    fig, (axes,) = plots.figure(height=2.8)
    for name, values in leaks.items():
        axes.plot(sizes, values, marker="o", markersize=4, label=f"hidden scores: {name}")
    axes.set_xscale("log")
    plots.label(axes, "What a mask lets through", "size: visible keys score minus this", "share on the hidden key")
    axes.legend(fontsize=9)
    return fig


@contextmanager
def watched(look: Callable[[Tensor, Tensor, int], None]) -> Iterator[None]:
    """Show `look` the queries, keys and window of every layer of a model that runs meanwhile."""
    before = gpt.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int, *rest) -> Tensor:
        look(q, k, window)
        return before(q, k, v, window, *rest)

    gpt.attend = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        gpt.attend = before


@torch.no_grad()
def across(model: GPT, tokens: Tensor, documents: Tensor) -> list[float]:
    """For each layer, the share of attention that crosses a boundary: tokens and document numbers (B, T).

    Queries of a row's first document have nothing to cross, and are left out.
    """
    shares: list[float] = []
    inside = same_document(documents, documents).unsqueeze(1)  # (B, 1, T, T)
    later = documents != documents[:, :1]  # (B, T)

    def look(q: Tensor, k: Tensor, window: int) -> None:
        T = q.size(1)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.size(3) ** 0.5
        weights = scores.masked_fill(~window_mask(T, T, window, 0, q.device), -torch.inf).softmax(-1)
        crossing = (weights * ~inside).sum(-1).mean(1)  # (B, T)
        shares.append(float(crossing[later].mean()))

    with watched(look):
        model.hidden(tokens)
    return shares
