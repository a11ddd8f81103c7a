"""A run's records as lines for a person: on a terminal, in a log file, in an executed notebook."""

import sys

from tqdm import tqdm


def clock(seconds: float) -> str:
    """A duration as people read it. Taught in chapter 07_pretrain.

    >>> clock(42), clock(125), clock(7325)
    ('42s', '2m05s', '2h02m')
    """
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds // 60 % 60:02d}m"


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def _deviation(z: float | None) -> str:
    return "" if z is None else f" ({z:+.1f}z)"


def step_line(record: dict, total: int, eta: float | None = None) -> str:
    """One step for a person: the norm is the global one before any clipping; an unknown MFU is left out, and so are
    z-scores that the watch doesn't have yet and the first pass over the data.

    >>> step_line({"step": 7, "loss": 8.3, "grad_norm": 0.41, "rate": 0.5, "seconds": 0.25, "mfu": None,
    ...            "tokens_per_second": 819.0, "stall": 0.001, "loss_z": -0.31, "norm_z": 2.0, "epoch": 1},
    ...           total=700, eta=173.0)
    'step 7/700  loss 8.3000 (-0.3z)  norm 0.410 (+2.0z)  rate 0.500  250 ms  819 tok/s  stall 1 ms  epoch 1  ETA 2m53s'
    """
    parts = [
        f"step {record['step']}/{total}",
        f"loss {_number(record['loss'], '.4f')}{_deviation(record.get('loss_z'))}",
        f"norm {_number(record['grad_norm'], '.3f')}{_deviation(record.get('norm_z'))}",
        f"rate {record['rate']:.3f}",
        f"{1e3 * record['seconds']:.0f} ms",
    ]
    if record.get("mfu") is not None:
        parts.append(f"MFU {100 * record['mfu']:.1f}%")
    parts += [f"{record['tokens_per_second']:,.0f} tok/s", f"stall {1e3 * record['stall']:.0f} ms"]
    if record.get("epoch"):
        parts.append(f"epoch {record['epoch']}")
    if eta is not None:
        parts.append(f"ETA {clock(eta)}")
    if record.get("skipped"):
        parts.append("SKIPPED")
    return "  ".join(parts)


class Console:
    """An observer that tells a person how the run goes: a progress bar on a terminal, a plain line every few per
    cent elsewhere (a log file and an executed notebook keep every line, and a bar would fill them).
    """

    def __init__(self, total: int, first: int = 0, stream=None, every: float = 0.02) -> None:
        self.total, self.stream = total, stream or sys.stdout
        self.every = max(1, round(total * every))
        self.seconds = 0.0  # smoothed time of a step
        self.last = first
        terminal = self.stream.isatty()
        self.bar = tqdm(total=total, initial=first, file=self.stream, unit="step") if terminal else None

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)

    def _step(self, record: dict) -> None:
        share = 0.1 if self.seconds else 1.0
        self.seconds += share * (record["seconds"] - self.seconds)
        due = record["step"] % self.every == 0 or record["step"] in (1, self.total) or record.get("skipped")
        text = step_line(record, self.total, (self.total - record["step"]) * self.seconds)
        if self.bar is not None:
            self.bar.set_postfix_str(text.split("  ", 1)[1], refresh=False)
            self.bar.update(record["step"] - self.last)
            self.last = record["step"]
        elif due:
            self.say(text)

    def __call__(self, record: dict) -> None:
        kind = record.get("kind")
        if kind == "step":
            self._step(record)
        elif kind == "validation":
            part = "whole split" if record["whole"] else f"{record['rows']:,} rows of the split"
            self.say(f"validation at step {record['step']}: {record['bpb']:.4f} bits per byte ({part})")
        elif kind == "sample":
            self.say(f"sample at step {record['step']}: {record['prompt'] + ' | ' + record['text']!r}")
        elif kind == "checkpoint":
            self.say(
                f"checkpoint at step {record['step']}: {record['bytes'] / 1e6:,.0f} MB in {record['seconds']:.1f} s,"
                f" training stood still for {record['stall']:.1f} s"
            )
        elif "say" in record:
            self.say(record["say"])
        if kind == "end" and self.bar is not None:
            self.bar.close()
