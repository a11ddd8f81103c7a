"""Measuring and drawing for chapter 06: times side by side, bytes that operators move, roofs, shares, a dial."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from ipywidgets import Dropdown, FloatLogSlider, IntSlider, ToggleButtons, VBox
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanolearn import devices, flops
from nanolearn.lab import dials, plots
from nanolearn.recipe import Recipe
from nanolearn.roofline import Roof

NO_TRAFFIC = {"empty", "empty_like", "empty_strided", "_unsafe_view", "_reshape_alias", "detach"}
FEWEST = 3  # rounds that a band needs
DIALLED = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X")


class Traffic(TorchDispatchMode):
    """Counts the bytes that torch's operators read and write, and the operators: what memory would have to move if each
    ran alone and kept nothing in a cache. Views move nothing.

    >>> import torch
    >>> x = torch.ones(1000)
    >>> with Traffic() as moved:
    ...     _ = (x + 1).view(10, 100)
    >>> moved.bytes, moved.operators
    (8000, 1)

    Taught in chapter 06_mfu.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.operators = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in NO_TRAFFIC:
            moved = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in moved)
            self.operators += 1
        return out


def side_by_side(
    calls: Mapping[str, Callable[[], object]], repeats: int, wait: Callable[[], None], limit: float = 10.0
) -> dict[str, np.ndarray]:
    """Seconds of each call, (repeats,) by name: once for nothing, then in turn, so that a neighbour's burst hits all.

    `wait` is called before the clock is read: an accelerator's work is queued (`host.synchroniser`). After `limit`
    seconds no new round begins, but FEWEST are always made: a busy machine gives fewer repeats, and says how many.

    >>> sorted(side_by_side({"a": lambda: 1, "b": lambda: 2}, 3, lambda: None))
    ['a', 'b']

    Taught in chapter 06_mfu.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    until = perf_counter() + limit
    for round_number in range(repeats + 1):
        if round_number > FEWEST and perf_counter() > until:
            break
        for name, call in calls.items():
            wait()
            begun = perf_counter()
            call()
            wait()
            if round_number:  # the first round starts threads and fills caches
                taken[name].append(perf_counter() - begun)
    return {name: np.array(seconds) for name, seconds in taken.items()}


def band(values: Iterable[float], form: str = ".1%") -> str:
    """Median, range and number of repeated measurements, as one string.

    >>> band([0.5, 0.25, 0.75])
    '50.0% (25.0% to 75.0%, n=3)'
    """
    sample = np.array(list(values))
    return f"{np.median(sample):{form}} ({sample.min():{form}} to {sample.max():{form}}, n={len(sample)})"


def roofline_figure(roofs: Mapping[str, Roof], points: Mapping[str, tuple[float, float]]) -> Figure:
    """Roofs, and work as points (FLOPs a byte, FLOP/s), on two logarithmic axes.

    >>> roofline_figure({"here": Roof(1e11, 1e10, "")}, {"add": (0.125, 1e9)}).axes[0].get_xscale()
    'log'
    """
    fig, (axes,) = plots.figure(height=3.9)
    reach = [intensity for intensity, _ in points.values()] + [roof.ridge for roof in roofs.values()]
    left, right = min(reach) / 2, max(reach) * 6
    for (name, roof), style in zip(roofs.items(), ("-", "--", "-."), strict=False):
        x = np.array([left, roof.ridge, right])
        axes.plot(x, [roof.attainable(one) for one in x], style, label=name)
        axes.plot(roof.ridge, roof.peak, "|", color=plots.GREY, markersize=12)
    for name, (intensity, rate) in points.items():
        axes.plot(intensity, rate, "o", color=plots.VERMILION, markersize=5)
        axes.annotate(name, (intensity, rate), (5, -11), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.yaxis.set_major_formatter(plots.EngFormatter())
    plots.label(axes, "Roofline", "intensity (FLOPs a byte)", "speed (FLOP/s)")
    axes.legend(fontsize=8, loc="upper left")
    return fig


def definitions_figure(runs: Mapping[str, Mapping[str, float]]) -> Figure:
    """MFU of runs under several definitions: a group of bars for each run; shares, drawn in percent.

    >>> definitions_figure({"a run": {"palm": 0.5, "canonical": 0.4}}).axes[0].get_xlabel()
    'MFU (%)'
    """
    lines = sum(map(len, runs.values())) + len(runs)
    fig, (axes,) = plots.figure(height=0.23 * lines + 0.9)
    at, ticks = 0.0, []
    for name, shares in runs.items():
        axes.text(0, at, name, fontsize=9, fontweight="bold", va="center")
        for number, (definition, share) in enumerate(shares.items()):
            at += 1
            axes.barh(at, 100 * share, color=plots.PALETTE[number % len(plots.PALETTE)], height=0.75)
            axes.text(100 * share + 0.6, at, f"{share:.1%}", fontsize=8, va="center")
            ticks.append((at, definition))
        at += 1.2
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks], fontsize=8)
    axes.set_ylim(at - 0.5, -0.9)
    most = max(share for shares in runs.values() for share in shares.values())
    axes.set_xlim(0, 100 * most * 1.12)
    axes.grid(visible=False, axis="y")
    if most > 1:
        axes.axvline(100, color=plots.VERMILION, lw=1, ls=":")
    plots.label(axes, "The same speed under several counts", "MFU (%)", "")
    return fig


def causes_figure(shares: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """For each cause the shares of the peak without it and with it: dots are medians, lines the whole range.

    >>> causes_figure({"waiting": ([0.5, 0.6], [0.2, 0.3])}).axes[0].get_xlabel()
    'share of the measured peak (%)'
    """
    fig, (axes,) = plots.figure(height=0.55 * len(shares) + 1.1)
    for row, (without, provoked) in enumerate(shares.values()):
        for values, shift, colour, mark in ((without, -0.15, plots.BLUE, "o"), (provoked, 0.15, plots.VERMILION, "s")):
            percent = 100 * np.array(values)
            axes.plot([percent.min(), percent.max()], [row + shift] * 2, color=colour, lw=1.2)
            label = "_" if row else "without" if shift < 0 else "provoked"  # matplotlib's legend skips "_"
            axes.plot(np.median(percent), row + shift, mark, color=colour, markersize=6, label=label)
    axes.set_yticks(range(len(shares)), list(shares))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.legend(fontsize=8, loc="lower right")
    plots.label(axes, "Five ways to lose MFU", "share of the measured peak (%)", "")
    return fig


def spent_figure(parts: Mapping[str, float], whole: float) -> Figure:
    """Estimated seconds of the parts of a step, end to end, above the step that was measured.

    >>> spent_figure({"products": 0.2, "memory": 0.1}, 0.5).axes[0].get_xlabel()
    'time (milliseconds)'
    """
    fig, (axes,) = plots.figure(height=1.9)
    at = 0.0
    for number, (name, seconds) in enumerate(parts.items()):
        colour, hatch = plots.PALETTE[number % len(plots.PALETTE)], ("", "///", "...", "xx")[number % 4]
        axes.barh(0, 1e3 * seconds, left=at, height=0.6, fc=colour, ec="white", hatch=hatch, label=name)
        at += 1e3 * seconds
    axes.barh(1, 1e3 * whole, height=0.6, color=plots.GREY)
    axes.set_yticks([0, 1], ["estimate", "measured"])
    axes.set_ylim(1.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.legend(fontsize=8, ncols=len(parts), loc="lower center", bbox_to_anchor=(0.5, 1.3))
    plots.label(axes, "Where a step's time goes", "time (milliseconds)", "")
    return fig


def shares_by_definition(shape: flops.Shape, tokens_per_second: float, peak: float, count: int = 1) -> dict[str, float]:
    """MFU of one speed under each definition, by name.

    >>> shape = Recipe.from_depth(24, window="L").shape()
    >>> round(shares_by_definition(shape, 524_288 / 7.7, 1307.4e12)["canonical"], 4)
    0.2752

    Taught in chapter 06_mfu.
    """
    speeds = {
        name: flops.mfu(flops.per_token(shape, name), tokens_per_second, peak, count) for name in flops.DEFINITIONS
    }
    return {name: share for name, share in speeds.items() if share is not None}


def dial() -> VBox:
    """Depth, window, speed and device over `definitions_figure`; a reader without a kernel has that figure.

    Taught in chapter 06_mfu.
    """
    controls = {
        "depth": IntSlider(24, min=4, max=32, step=2, description="depth"),
        "window": ToggleButtons(options=["SSSL", "L"], description="windows"),
        "speed": FloatLogSlider(100_000, min=3, max=6, step=0.05, description="tokens/s"),
        "device": Dropdown(options=DIALLED, description="device"),
    }

    def draw(depth: int, window: str, speed: float, device: str) -> tuple[Figure, str, str]:
        shape = Recipe.from_depth(depth, window=window).shape()
        shares = shares_by_definition(shape, speed, devices.peak_flops(device) or 0.0)
        over = " More than 100%: no machine does that, so a number is wrong." if max(shares.values()) > 1 else ""
        fig = definitions_figure({f"depth {depth}, {window}, {speed:,.0f} tokens/s on one {device}": shares})
        caption = f"canonical {shares['canonical']:.1%}, palm {shares['palm']:.1%}.{over}"
        return fig, caption, f"Bars of the MFU of depth {depth} at {speed:,.0f} tokens a second under five definitions."

    return dials.dial(controls, draw)
