"""The device query with every kind of device simulated: by the variable, by name, and behind torch's own calls."""

import importlib.util
import shutil
from types import SimpleNamespace

import pytest
import torch

from nanolearn import hardware, host
from nanolearn.errors import UserError
from nanolearn.hardware import (
    Machine,
    can_compile,
    choose_compile,
    choose_dtype,
    detect,
    float8_dtype,
    named,
    select,
    torch_device,
)

CPU = Machine("cpu", "a processor", memory=16 * 10**9)
APPLE = Machine("mps", "Apple M3 Max", memory=36 * 10**9)


def card(capability=None, hip=None, arch=None, name="a card", count=1):
    return Machine("cuda", name, count, 24 * 10**9, capability, hip, None if hip else "12.8", arch)


def test_simulated_by_the_variable(monkeypatch):
    monkeypatch.setenv("NANOLEARN_SIMULATE", "8 x NVIDIA H100 80GB HBM3")
    machine = detect()
    assert (machine.type, machine.count, machine.memory) == ("cuda", 8, 80 * 10**9)
    assert (machine.capability, machine.arch, machine.hip, machine.vendor) == ((9, 0), "sm_90", None, "nvidia")
    assert machine.label == "8 x NVIDIA H100 80GB HBM3 (simulated)"


def test_simulated_mi300x(monkeypatch):
    monkeypatch.setenv("NANOLEARN_SIMULATE", "AMD Instinct MI300X")
    machine = detect()
    assert (machine.type, machine.count, machine.arch, machine.vendor) == ("cuda", 1, "gfx942", "amd")
    assert machine.hip
    assert machine.cuda is None
    assert machine.simulated


def test_an_unknown_simulated_name_is_refused_with_near_ones(monkeypatch):
    monkeypatch.setenv("NANOLEARN_SIMULATE", "2 x NVIDIA H1000")
    with pytest.raises(UserError, match="did you mean .*H100"):
        detect()


def test_named_is_not_simulated_and_counts():
    assert named("NVIDIA H100 80GB HBM3", 8) == named("8 x NVIDIA H100 80GB HBM3")
    assert not named("H100").simulated
    with pytest.raises(UserError, match="give 1 or more"):
        named("H100", 0)


def fake_cuda(monkeypatch, devices, hip=None):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: devices[i])
    monkeypatch.setattr(torch.version, "hip", hip)


def test_a1_hip_decides_and_not_the_capability(monkeypatch):
    """An MI300X reports capability 9.4: no Hopper."""
    one = SimpleNamespace(
        name="AMD Instinct MI300X", major=9, minor=4, total_memory=206 * 10**9, gcnArchName="gfx942:sramecc+:xnack-"
    )
    fake_cuda(monkeypatch, [one], hip="6.4.0")
    machine = detect()
    assert (machine.vendor, machine.arch, machine.capability, machine.hip) == ("amd", "gfx942", (9, 4), "6.4.0")
    assert choose_dtype(machine).reason.startswith("gfx942")


def test_cards_of_another_kind_are_left_out(monkeypatch):
    def props(name):
        return SimpleNamespace(name=name, major=8, minor=9, total_memory=25 * 10**9)

    fake_cuda(monkeypatch, [props("NVIDIA GeForce RTX 4090")] * 2 + [props("NVIDIA T400")])
    machine = detect()
    assert (machine.count, machine.arch, machine.memory) == (2, "sm_89", 25 * 10**9)


def test_without_an_accelerator_the_cpu_is_the_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    machine = detect()
    assert (machine.type, machine.count, machine.vendor) == ("cpu", 1, "cpu")
    assert machine.memory == host.memory()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert detect().vendor == "apple"


@pytest.mark.parametrize(
    ("machine", "wanted", "device"),
    [
        (APPLE, "mps", "mps"),
        (named("8 x H100"), "cuda:1", "cuda:1"),
        (named("8 x H100"), "cuda", "cuda:0"),
        (named("8 x MI300X"), "hip", "cuda:0"),
        (named("8 x MI300X"), "hip:7", "cuda:7"),
        (named("H100"), "cpu", "cpu"),
    ],
)
def test_t14_device_strings_are_compared_by_type(machine, wanted, device):
    chosen = select(machine, wanted)
    assert torch_device(chosen) == torch.device(device)
    assert chosen.type == torch.device(device).type


def test_t14_a_rank_gets_the_device_of_its_number():
    assert [torch_device(named("4 x H100"), rank).index for rank in range(4)] == [0, 1, 2, 3]
    assert torch_device(APPLE, 0) == torch.device("mps")


@pytest.mark.parametrize("wanted", ["cuda:8", "mps", "gpu", "cuda:x", "CUDA"])
def test_t14_a_device_that_is_not_there_is_refused(wanted):
    with pytest.raises(UserError, match="device"):
        select(named("8 x H100"), wanted)


@pytest.mark.parametrize(
    ("machine", "dtype"),
    [
        (CPU, "float32"),
        (APPLE, "float32"),
        (card((9, 0), arch="sm_90"), "bfloat16"),
        (card((8, 0), arch="sm_80"), "bfloat16"),
        (card((12, 0), arch="sm_120"), "bfloat16"),
        (card((7, 5), arch="sm_75", name="Tesla T4"), "float16"),
        (card((7, 0), arch="sm_70", name="Tesla V100-SXM2-16GB"), "float16"),
        (card((6, 1), arch="sm_61", name="NVIDIA GeForce GTX 1080"), "float32"),
        (card((9, 4), hip="6.4", arch="gfx942"), "bfloat16"),
        (card((9, 0), hip="6.4", arch="gfx90a"), "bfloat16"),
        (card((11, 0), hip="6.4", arch="gfx1100"), "bfloat16"),
        (card((9, 0), hip="6.4", arch="gfx906"), "float16"),
        (card((10, 3), hip="6.4", arch="gfx1030"), "float32"),
    ],
)
def test_dtype_by_hardware_with_a_reason(machine, dtype):
    choice = choose_dtype(machine)
    assert choice.value == dtype
    assert len(choice.reason) > 10
    assert getattr(torch, choice.value).is_floating_point


def test_dtype_wishes():
    assert choose_dtype(CPU, "bf16").value == "bfloat16"
    assert "loss scaling" in choose_dtype(card((8, 0)), "fp16").reason
    with pytest.raises(UserError, match=r"no bfloat16.*float16"):
        choose_dtype(named("Tesla T4"), "bfloat16")
    with pytest.raises(UserError, match="float16"):
        choose_dtype(CPU, "float16")
    with pytest.raises(UserError, match="give auto, bfloat16"):
        choose_dtype(CPU, "fp8")


def test_a5_the_8_bit_float_goes_by_architecture_and_bf16_is_the_default():
    assert float8_dtype(named("MI300X")) == "float8_e4m3fnuz"
    assert float8_dtype(named("MI355X")) == float8_dtype(named("H100")) == float8_dtype(named("L4")) == "float8_e4m3fn"
    assert float8_dtype(named("A100")) is float8_dtype(named("MI250X")) is float8_dtype(CPU) is None
    assert torch.finfo(getattr(torch, float8_dtype(named("MI300X")))).max == 240
    assert torch.finfo(getattr(torch, float8_dtype(named("H100")))).max == 448
    assert choose_dtype(named("MI300X")).value == "bfloat16"


def test_t13_compiling_is_opt_in_on_a_cpu():
    assert can_compile(CPU).value is False
    assert "compile=True" in can_compile(CPU).reason


@pytest.mark.parametrize("lacking", ["compiler", "setuptools", "headers", "triton"])
def test_t13_eager_and_said_when_something_is_missing(monkeypatch, tmp_path, lacking):
    specs = {name: None if name == lacking else object() for name in ("setuptools", "triton")}
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", specs.get)
    monkeypatch.setattr(shutil, "which", lambda name: None if lacking == "compiler" else f"/bin/{name}")
    (tmp_path / "Python.h").touch()
    include = tmp_path / "none" if lacking == "headers" else tmp_path
    monkeypatch.setattr(hardware.sysconfig, "get_paths", lambda: {"include": str(include)})
    choice = can_compile(named("H100"))
    assert choice.value is False
    words = {"compiler": "C++ compiler", "setuptools": "setuptools", "headers": "Python's headers", "triton": "Triton"}
    assert words[lacking] in choice.reason
    assert can_compile(CPU, asked=True).value is (lacking == "triton")  # a CPU needs no Triton


@pytest.mark.parametrize(
    ("machine", "wanted", "value", "said"),
    [
        (CPU, "auto", False, "compile=True"),
        (CPU, True, True, "torch.compile"),
        (CPU, False, False, "compile=False was asked for"),
        (APPLE, "auto", False, "compile=True"),
        (named("H100"), "auto", True, "torch.compile"),
        (named("MI300X"), "auto", True, "torch.compile"),
        (named("H100"), False, False, "compile=False was asked for"),
    ],
)
def test_t13_what_is_compiled_and_why(monkeypatch, machine, wanted, value, said):
    monkeypatch.setattr(hardware, "_compile_needs", lambda kind: [])
    choice = choose_compile(machine, wanted)
    assert choice.value is value
    assert said in choice.reason


def test_t13_eager_where_compiling_cannot_work(monkeypatch):
    monkeypatch.setattr(hardware, "_compile_needs", lambda kind: ["Triton"])
    for wanted in ("auto", True):
        assert choose_compile(named("H100"), wanted) == hardware.Choice(False, "eager: torch.compile needs Triton")


def test_t14_a_device_is_selected_once_however_often_it_is_asked_for():
    machine = select(named("8 x H100"), "cuda:3")
    assert select(select(machine, "cuda:3"), "cuda") == machine
    with pytest.raises(UserError, match="'cuda:0' of H100: give 3 to 3"):
        select(machine, "cuda:0")
    assert select(CPU, "cpu") == CPU
