"""A run of other processes: each record once, whole and in order, whatever a resume does to the file."""

import json
import os
import subprocess
import sys
import time

import pytest

from nanolearn.train import follow as room
from nanolearn.train.agent import STARTED_BY
from nanolearn.train.follow import Follower, failure, follow, start
from nanolearn.train.records import NAME, Records
from nanolearn.train.stall import Stalled


def step(number: int, **more) -> dict:
    return {"kind": "step", "step": number, **more}


@pytest.fixture
def seen():
    return []


def test_a_line_that_is_being_written_is_handed_on_when_it_is_whole(tmp_path, seen):
    follower = Follower(tmp_path, [seen.append])
    follower.look()
    with (tmp_path / NAME).open("a") as file:
        for text, now in (('{"step": 1}\n{"st', 1), ('ep": 2}', 1), ("\n", 2)):
            file.write(text)
            file.flush()
            follower.look()
            assert seen == [{"step": number + 1} for number in range(now)]


@pytest.mark.parametrize("looks", [1, 3])
@pytest.mark.parametrize("torn", ["", '{"kind": "step", "st'])
def test_a_resume_that_cuts_the_file_loses_and_repeats_nothing(tmp_path, seen, torn, looks):
    """The new file may be shorter or longer than the old one by the time of the next look."""
    same = {"kind": "event", "step": 4, "say": "skipped"}
    with Records(tmp_path, 0) as out:
        for record in (step(1), step(2), step(3), same, step(4)):
            out.append(record)
    with (tmp_path / NAME).open("a") as file:
        file.write(torn)
    follower = Follower(tmp_path, [seen.append])
    new = [{"kind": "start", "step": 2}, step(3, loss=1.0), same, *(step(n, loss=2.0) for n in range(4, 4 + looks**4))]
    with Records(tmp_path, 2) as out:
        if looks > 1:
            follower.look()
        for record in new:
            out.append(record)
            if looks > 1:
                follower.look()
    follower.look()
    assert seen == new


def test_a_resume_that_cuts_nothing_goes_on(tmp_path, seen):
    with Records(tmp_path, 0) as out:
        out.append(step(1))
    follower = Follower(tmp_path, [seen.append])
    with Records(tmp_path, 1) as out:
        out.append(step(2))
    follower.look()
    assert seen == [step(2)]


def test_what_a_worker_said_is_what_a_person_reads(tmp_path):
    log = tmp_path / "workers.log"
    log.write_text("noise\nnanolearn.errors.UserError: no corpus 'x': give one\nRoot Cause: exit 1\n")
    assert str(failure(tmp_path)) == "no corpus 'x': give one"
    log.write_text("noise\nStalled: no rank came on: wait\nUserError: another, from the way out\n")
    assert isinstance(failure(tmp_path), Stalled)
    log.write_text("noise\nTraceback (most recent call last):\n  File a\nRuntimeError: Connection closed by peer\n")
    other = tmp_path / "workers.node1-5.log"
    other.write_text("Traceback (most recent call last):\n  File a\nIndexError: b\n")
    assert "IndexError" in str(failure(tmp_path))  # what the second node said: the first only lost it
    other.unlink()
    log.write_text("noise\nTraceback (most recent call last):\n  File a\nZeroDivisionError: b\n")
    assert "ZeroDivisionError" in str(failure(tmp_path))


WORKER = "import json, os; print(json.dumps([os.getsid(0), dict(os.environ)]))"


def test_workers_have_their_own_session_and_time_for_a_large_save(tmp_path):
    assert start([sys.executable, "-c", WORKER], 2, tmp_path / room.LOG).wait() == 0
    session, environment = json.loads((tmp_path / room.LOG).read_text())
    assert session != os.getsid(0)
    assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(room.GRACE)
    assert environment[STARTED_BY] == str(os.getpid())


def test_torch_still_reads_the_grace_from_the_environment(monkeypatch):
    from torch.distributed.launcher.api import LaunchConfig

    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "77")
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == 77


def test_an_interrupt_lets_the_workers_save_before_it_returns(tmp_path, monkeypatch):
    """SIGTERM reaches them once; what they write while they stop is handed on."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        "    time.sleep(0.3)\n"
        f"    (pathlib.Path(sys.argv[1]) / '{NAME}').write_text('{{\"step\": 1}}\\n')\n"
        "    sys.exit('UserError: saved')\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        f"(pathlib.Path(sys.argv[1]) / 'ready').touch()\n"
        "time.sleep(60)\n"
    )
    seen = []

    def interrupted(_seconds):
        if (tmp_path / "ready").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(room.time, "sleep", interrupted)
    with pytest.raises(room.UserError, match="saved"):
        follow([sys.executable, str(script), str(tmp_path)], 2, tmp_path, [seen.append])
    assert seen == [{"step": 1}]


AGENT = """
import pathlib, subprocess, sys, time
workers = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"])
pathlib.Path(sys.argv[1]).touch()  # the result
workers.wait()
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)  # for nodes that left before
"""


def test_a_result_ends_the_agent_only_when_its_workers_are_gone(tmp_path, monkeypatch):
    """They still close trackers and end a save after the result is written; the agent alone waits for other nodes."""
    monkeypatch.setattr(room, "LEAVING", 0.5)
    begun = time.monotonic()
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path / "result"), str(tmp_path / "closed")])
    room.attend(agent, tmp_path / "result")
    assert (tmp_path / "closed").exists()
    assert time.monotonic() - begun < 30
