"""Records: whole lines only, nothing lost on resume, one line for a person."""

import io
import json
import math

import pytest

from nanolearn.train import records
from nanolearn.train.console import Console, step_line
from nanolearn.train.records import ASIDE, NAME, Records, read


def step(n, **more):
    return {"kind": "step", "step": n, "loss": 5.0, "grad_norm": 1.0, "rate": 1.0, "seconds": 0.1, "mfu": None,
            "tokens_per_second": 100.0, "stall": 0.0, **more}  # fmt: skip


def test_reading_stops_at_the_last_line_break(tmp_path):
    (tmp_path / NAME).write_text('{"step": 1}\n{"step": 2}')  # the second may still be written
    assert read(tmp_path) == [{"step": 1}]


def test_a_sync_forces_the_lines_onto_the_disk_and_a_full_disk_is_one_line(tmp_path, monkeypatch):
    forced = []
    with Records(tmp_path, 0) as out:
        out.append(step(1))
        monkeypatch.setattr(records.os, "fsync", lambda number: forced.append(records.os.fstat(number).st_ino))
        out.sync()
        assert forced == [(tmp_path / NAME).stat().st_ino]

        def full(number):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(records.os, "fsync", full)
        with pytest.raises(records.UserError, match="No space left on device"):
            out.sync()


def test_a_torn_line_does_not_hide_the_ones_around_it(tmp_path):
    (tmp_path / NAME).write_bytes(b'{"step": 1}\n{"ste\xff{"step": 2}\n{"step": 3}\n')
    assert [r["step"] for r in read(tmp_path)] == [1, 3]


def test_no_records_yet(tmp_path):
    assert read(tmp_path) == []


def test_not_finite_numbers_are_null(tmp_path):
    with Records(tmp_path, 0) as out:
        out.append({"kind": "step", "step": 1, "loss": math.nan, "z": [math.inf, 1.0]})
    line = (tmp_path / NAME).read_text()
    assert json.loads(line, parse_constant=lambda text: pytest.fail(text))["z"] == [None, 1.0]


def test_lines_after_the_resumed_step_are_set_aside_and_nothing_is_lost(tmp_path):
    with Records(tmp_path, 0) as out:
        for n in range(1, 6):
            out.append(step(n))
        out.append({"kind": "validation", "step": 4, "bpb": 2.0})
    with (tmp_path / NAME).open("a") as file:
        file.write('{"kind": "step", "st')  # killed while writing
    before = (tmp_path / NAME).read_text()
    with Records(tmp_path, 3) as out:
        assert out.set_aside == 4
        out.append(step(4, loss=4.5))
    assert [r["step"] for r in read(tmp_path)] == [1, 2, 3, 4]
    assert read(tmp_path)[-1]["loss"] == 4.5
    aside = (tmp_path / ASIDE).read_text()
    kept = "".join(json.dumps(r) + "\n" for r in read(tmp_path)[:3])
    assert sorted((kept + aside).split()) == sorted(before.split())
    with Records(tmp_path, 4) as again:
        assert again.set_aside == 0


def test_observers_see_what_was_written(tmp_path):
    seen = []
    with Records(tmp_path, 0, (seen.append,)) as out:
        out.append({"kind": "event", "step": 0, "say": "hello"})
    assert seen == read(tmp_path)


def test_an_unknown_mfu_is_left_out_and_a_known_one_shown():
    assert "MFU" not in step_line(step(1), 10)
    assert "MFU 27.5%" in step_line(step(1, mfu=0.2752), 10)


def test_a_skipped_step_has_no_loss_and_says_so():
    line = step_line(step(3, loss=None, skipped=True), 10)
    assert "loss none" in line
    assert line.endswith("SKIPPED")


def test_headless_console_prints_plain_lines_every_few_percent():
    out = io.StringIO()
    console = Console(100, stream=out)
    for n in range(1, 101):
        console(step(n))
    console({"kind": "validation", "step": 100, "bpb": 1.5, "whole": True, "rows": 7})
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + 50 + 1  # the first step, every 2%, the validation
    assert "\r" not in out.getvalue()
    assert lines[-1] == "validation at step 100: 1.5000 bits per byte (whole split)"


def test_a_terminal_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    console = Console(10, stream=out)
    for n in range(1, 11):
        console(step(n))
    console({"kind": "end", "step": 10})
    assert "\r" in out.getvalue()


def test_a_full_disk_is_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    out = Records(tmp_path, 0)

    class Full:
        def write(self, line):
            return len(line) - 3

        def close(self):
            pass

    monkeypatch.setattr(out, "_file", Full())
    with pytest.raises(records.UserError, match="resumes from its newest checkpoint"):
        out.append(step(1))
