"""The computer around the accelerator: what it is called, what it holds, how fast it is."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nanolearn import host


def test_memory_is_at_most_what_the_machine_has():
    assert 0 < host.memory() <= psutil.virtual_memory().total


def test_memory_of_a_container_is_its_limit(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "Path", lambda _: limit)
    for text, expected in (("1073741824\n", 1 << 30), ("max\n", psutil.virtual_memory().total)):
        limit.write_text(text)
        assert host.memory() == expected


def test_processor_is_what_the_kernel_says():
    info = Path("/proc/cpuinfo")
    if info.exists() and "model name" in info.read_text():
        assert host.processor() in info.read_text()
    else:
        assert host.processor()


def test_speed_is_measured_within_its_time():
    # Between a 1990s and a 2030s processor: the measurement only has to be one.
    assert 1e8 < host.measure_flops(0.05) < 1e14


def test_an_accelerator_is_waited_for_before_the_clock_is_read(monkeypatch):
    waited = []
    monkeypatch.setattr(host.torch.cuda, "synchronize", waited.append)
    host.synchroniser("cuda:1")()
    assert waited == [host.torch.device("cuda", 1)]
    assert host.synchroniser("mps") is host.torch.mps.synchronize
    assert host.synchroniser("cpu")() is None and len(waited) == 1


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (set(), "freed memory: blocks up to 1,024 MiB kept for the next tensor"),
        ({(-3, 1 << 30)}, "freed memory: blocks up to 32 MiB kept for the next tensor"),
        ({(-3, 1 << 30), (-3, 32 << 20)}, "freed memory: small blocks only kept for the next tensor"),
        (
            {(-1, (1 << 31) - 1)},
            "freed memory: blocks up to 1,024 MiB kept for the next tensor, but the heap may still shrink",
        ),
        ({(-3, 1 << 30), (-3, 32 << 20), (-1, (1 << 31) - 1)}, "freed memory: mallopt refused, left as it was"),
    ],
)
def test_an_older_glibc_is_asked_for_less_and_what_it_took_is_said(monkeypatch, refused, said):
    libc = SimpleNamespace(mallopt=lambda *wish: wish not in refused)
    monkeypatch.setattr(host.ctypes, "CDLL", lambda _: libc)
    monkeypatch.setattr(host.platform, "system", lambda: "Linux")
    monkeypatch.setattr(host.platform, "libc_ver", lambda: ("glibc", "2.31"))
    assert host.reuse_freed_memory() == said
