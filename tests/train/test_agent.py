"""N4: no process outlives the one that started it, also when that one is killed and can tell nobody."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import nanolearn
from nanolearn.train import agent

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells of a parent's death")
CHILD = "import signal, time; from nanolearn.train import agent; agent.die_with_starter(signal.SIGTERM); "
CHILD += "print('ready', flush=True); time.sleep(60)"
PARENT = """
import os, subprocess, sys
from nanolearn.train.agent import STARTED_BY
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True,
                         env={**os.environ, STARTED_BY: str(os.getpid())})
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@LINUX
def test_n4_a_child_in_its_own_session_ends_when_its_parent_is_killed():
    environment = {**os.environ, "PYTHONPATH": str(Path(nanolearn.__file__).parents[1])}
    command = [sys.executable, "-c", PARENT, CHILD]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    give_up = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@LINUX
def test_n4_a_parent_that_is_dead_already_is_noticed():
    with pytest.raises(SystemExit, match="is gone"):
        agent.die_with(os.getpid(), 0)  # nobody is their own parent


def test_a_process_that_nobody_claimed_asks_for_nothing(monkeypatch):
    monkeypatch.delenv(agent.STARTED_BY, raising=False)
    monkeypatch.setattr(agent, "die_with", lambda *args: pytest.fail("asked for a signal"))
    agent.die_with_starter(signal.SIGKILL)
    assert agent.STARTED_BY not in os.environ


def test_torchruns_signals_all_go_to_the_handler_that_is_replaced(monkeypatch):
    """Private names of torch: if they change, this says so, and not a save that is cut off by a second SIGTERM."""
    import inspect

    from torch.distributed.elastic.multiprocessing import api

    source = inspect.getsource(api.PContext.start)
    assert f"signal.signal(sig, {agent.HANDLER})" in source
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE" in source
    seen = []
    monkeypatch.setattr(agent.signal, "signal", lambda number, handler: seen.append((number, handler)))
    with pytest.raises(api.SignalException) as raised:
        agent._stop_once()
    assert raised.value.sigval == signal.SIGTERM
    assert seen == [(getattr(signal, name), signal.SIG_IGN) for name in agent.STOP]
