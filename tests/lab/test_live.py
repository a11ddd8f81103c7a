"""The live curve: cheap by construction, quiet when headless, and a static picture at the end."""

import pytest

from nanolearn.lab import live


def step(number: int, loss: float | None = 5.0, seconds: float = 0.5) -> dict:
    constant = {"rate": 1.0, "grad_norm": 0.4, "tokens_per_second": 1000.0, "mfu": None, "stall": 0.0}
    return {
        "kind": "step",
        "step": number,
        "loss": loss,
        "tokens": 512 * number,
        "seconds": seconds,
        **constant,
    }


class Clock:
    """A time that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """Stands for the notebook: counts what is shown, and makes a drawing cost a known time."""

    def __init__(self, clock: Clock, cost: float) -> None:
        self.clock, self.cost, self.figures, self.statuses = clock, cost, [], []

    def show_updating(self, fig, *, caption, alt):
        self.clock.now += self.cost
        self.figures.append(caption)
        return self.redraw

    def redraw(self, caption):
        self.clock.now += self.cost
        self.figures.append(caption)

    def display(self, *args, **kwargs):
        return self

    def update(self, bundle, raw):
        self.statuses.append(bundle["text/plain"])


@pytest.fixture
def staged(monkeypatch):
    def build(cost: float) -> tuple[live.LiveCurve, Stage, Clock]:
        clock = Clock()
        stage = Stage(clock, cost)
        monkeypatch.setattr(live.plots, "show_updating", stage.show_updating)
        monkeypatch.setattr(live, "display", stage.display)
        monkeypatch.setattr(live.Curves, "draw", lambda *_: None)  # the stage's clock stands for its cost
        return live.LiveCurve(steps=10_000, tokens=512 * 10_000, timer=clock), stage, clock

    return build


@pytest.mark.parametrize("cost", [0.001, 0.05, 0.3])
def test_drawing_takes_at_most_one_per_cent_and_never_comes_sooner_than_2_s(staged, cost):
    curve, stage, clock = staged(cost)
    begun = clock.now
    for number in range(1, 2001):
        clock.now += 0.5
        curve(step(number))
    assert curve.seconds <= 0.01 * (clock.now - begun)
    assert 1 < len(stage.figures) <= (clock.now - begun) / 2 + 2


def test_the_status_line_is_replaced_every_2_s(staged):
    curve, stage, clock = staged(0.3)
    for number in range(1, 101):
        clock.now += 0.5
        curve(step(number))
    assert 20 <= len(stage.statuses) <= 26
    assert stage.statuses[-1].startswith("step ")


def test_headless_lines_come_now_and_then_and_thin_out(staged, capsys):
    """8 minutes print 10 to 20 lines; 62 hours under 200 (papermill's log shows a display only once)."""
    curve, _, clock = staged(0.0)
    for number in range(1, 961):
        clock.now += 0.5
        curve(step(number))
    assert 10 <= len(capsys.readouterr().out.splitlines()) <= 20
    for number in range(961, 9000):
        clock.now += 25
        curve(step(number))
    assert len(capsys.readouterr().out.splitlines()) < 200


def test_validation_and_events_are_always_said(staged, capsys):
    curve, _, _ = staged(0.0)
    curve({"kind": "validation", "step": 5, "tokens": 2560, "bpb": 1.5})
    curve({"kind": "event", "say": "the disk is nearly full"})
    assert capsys.readouterr().out.splitlines() == [
        "validation at step 5: 1.5000 bits per byte",
        "the disk is nearly full",
    ]


def test_the_last_state_stays_as_a_picture(monkeypatch):
    clock = Clock()
    stage = Stage(clock, 0.0)
    monkeypatch.setattr(live.plots, "show_updating", stage.show_updating)
    monkeypatch.setattr(live, "display", stage.display)
    curve = live.LiveCurve(steps=10_000, tokens=512 * 10_000, timer=clock)
    with curve:
        for number in range(1, 4):
            clock.now += 0.1
            curve(step(number))
    assert "step 3/10000" in stage.figures[-1]
    assert "step 3/10000" in stage.statuses[-1]
    assert len(curve.axes[0].lines) == 1
    assert curve.axes[0].lines[0].get_xdata().tolist() == [512, 1024, 1536]


def test_it_works_outside_a_notebook(capsys):
    with live.LiveCurve(steps=2, tokens=1024) as curve:
        curve(step(1))
    assert "step 1/2" in capsys.readouterr().out
