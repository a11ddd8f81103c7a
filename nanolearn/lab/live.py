"""A run seen while it happens: an observer of the trainer's records that draws in the notebook.

Redrawing a figure costs 0.05 to 0.3 s of a core that also trains, so its own cost sets its pace: it is
redrawn at most once in 100 times what the last redraw took (1% of the time), and never more often than
every 2 s. In between, a line of text is replaced; that costs a thousandth of it. Headless, papermill's log
shows only the first state of a display, so a plain line is printed now and then too: every 30 s at first,
later every twentieth of the time so far.
"""

import time
from collections.abc import Callable, Iterable

from IPython.display import display

from nanolearn.lab import plots
from nanolearn.lab.bands import Bands
from nanolearn.lab.curves import Curves, name_axes
from nanolearn.train.console import clock, step_line

SHARE = 0.01  # of the time that passes may go into drawing
SOONEST = 2.0  # seconds
LINE_EVERY, LINE_SHARE = 30.0, 0.05
QUIET = "No step was taken here; what is drawn was recorded before."
ALT = "Two curves against tokens seen: left the training loss, right the bits per byte on validation text."


class LiveCurve:
    """An observer of a run's records, for `with LiveCurve(...) as curve: train(..., observers=[curve])`.

    `steps` and `tokens` are the whole run's; `history` holds the records before a resume; `behind` is drawn behind
    it, once. The last picture stays in the notebook as a static one. `seconds` is what drawing cost altogether.

    Taught in chapter 07_pretrain.
    """

    def __init__(
        self,
        steps: int,
        tokens: int,
        history: Iterable[dict] = (),
        behind: Bands | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.words = behind.words if behind is not None else ""
        self.steps, self.timer, self.curves = steps, timer, Curves(history)
        self.fig, self.axes = plots.figure(2, height=2.6)
        name_axes(*self.axes)
        for axes in self.axes:
            axes.set_xlim(0, 1.03 * tokens)
        if behind is not None:
            behind.draw(*self.axes)
        self.seconds, self.last, self.step_seconds = 0.0, "", 0.0
        # Fixed margins, with room for wider numbers: solving a layout anew would double what a redraw costs.
        self.fig.set_layout_engine(None)
        self.fig.subplots_adjust(left=0.1, right=0.96, bottom=0.2, top=0.88, wspace=0.3)
        self.start = self.timer()
        self.status = display({"text/plain": "waiting for the first step"}, raw=True, display_id=True)
        self.redraw = plots.show_updating(self.fig, caption="Waiting for the first step.", alt=ALT)
        self.next_line = self.next_status = self.start
        self.next_figure = self.start + max(SOONEST, (self.timer() - self.start) / SHARE)

    def __call__(self, record: dict) -> None:
        self.curves.add(record)
        now = self.timer()
        if record.get("kind") == "step":
            self._step(record, now)
        elif record.get("kind") == "validation":
            print(f"validation at step {record['step']}: {record['bpb']:.4f} bits per byte", flush=True)
        elif "say" in record:
            print(record["say"], flush=True)
        if now >= self.next_figure:
            self._figure()

    def _step(self, record: dict, now: float) -> None:
        self.step_seconds += (0.1 if self.step_seconds else 1.0) * (record["seconds"] - self.step_seconds)
        self.last = step_line(record, self.steps, (self.steps - record["step"]) * self.step_seconds)
        if now >= self.next_line:
            print(self.last, flush=True)
            self.next_line = now + max(LINE_EVERY, LINE_SHARE * (now - self.start))
        if now >= self.next_status and self.status is not None:
            self.status.update({"text/plain": self.last}, raw=True)
            self.next_status = now + SOONEST

    def _figure(self) -> None:
        began = self.timer()
        self.curves.draw(*self.axes)
        said = f"After {clock(began - self.start)}: {self.last}." if self.last else QUIET
        self.redraw(f"{said} {self.words}".strip())
        ended = self.timer()
        self.seconds += ended - began
        self.next_figure = ended + max(SOONEST, (ended - began) / SHARE)

    def close(self) -> None:
        """Draw the last state; nothing stays open."""
        if self.status is not None:
            self.status.update({"text/plain": self.last or "no step was taken here"}, raw=True)
        self._figure()

    def __enter__(self) -> "LiveCurve":
        return self

    def __exit__(self, *_) -> None:
        self.close()
