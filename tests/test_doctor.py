"""The doctor's checks with every kind of environment put before it."""

import subprocess
from importlib import metadata

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nanolearn import doctor
from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.hardware import Machine, named

CPU = Machine("cpu", "a processor", memory=16 * 10**9)


def test_one_line_for_a_notebook():
    text = doctor.line(CPU)
    assert "\n" not in text
    for words in ("nanolearn 0", "Python 3.", "torch 2.", "a processor", "16 GB", "float32", "eager", "attention"):
        assert words in text
    eight = doctor.line(named("8 x NVIDIA H100 80GB HBM3"))
    assert "8 x NVIDIA H100" in eight
    assert "bfloat16 (capability 9.0" in eight


def test_t13_the_line_says_why_nothing_is_compiled():
    assert "compile=True" in doctor.line(CPU)
    with_wish = doctor.line(CPU, Execution(compile=True))
    assert "torch.compile" in with_wish


def test_the_line_follows_the_execution():
    assert "bfloat16 (asked for" in doctor.line(CPU, Execution(dtype="bfloat16"))
    assert "NVIDIA" not in doctor.line(named("H100"), Execution(device="cpu"))


def test_what_is_simulated_says_so(monkeypatch):
    monkeypatch.setenv("NANOLEARN_SIMULATE", "AMD Instinct MI300X")
    assert "MI300X (simulated)" in doctor.line()
    page = "\n".join(map(str, doctor.examine()))
    for words in ("simulated", "192.0 GB", "gfx942", "full (", "bfloat16", "float8_e4m3fnuz", "1307.4 TFLOP/s"):
        assert words in page


@pytest.mark.parametrize(
    ("build", "sees", "present", "remedy"),
    [
        ("cpu", False, {"nvidia"}, "TORCH=cuda"),
        ("cpu", False, {"amd"}, "TORCH=rocm"),
        ("cuda", False, {"amd"}, "TORCH=rocm"),
        ("rocm", False, {"nvidia"}, "TORCH=cuda"),
        ("cuda", False, {"nvidia"}, "driver"),
        ("cuda", True, {"nvidia"}, ""),
        ("rocm", True, {"amd"}, ""),
        ("cpu", False, set(), ""),
        ("cuda", False, set(), ""),
        ("cuda", True, {"nvidia", "amd"}, ""),
    ],
)
def test_n8_a_build_that_does_not_match_the_hardware_is_said(build, sees, present, remedy):
    check = doctor.torch_fits(build, sees, present)
    assert (remedy in check.remedy) if remedy else not check.remedy
    assert build in check.found


@pytest.mark.parametrize(
    ("tool", "output", "expected"),
    [
        ("nvidia-smi", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: x)\n", {"nvidia"}),
        ("nvidia-smi", "NVIDIA-SMI has failed because it could not reach the driver\n", set()),
        ("rocminfo", "  Name:                    gfx942\n", {"amd"}),
        ("rocminfo", "ROCk module is NOT loaded\n", set()),
        ("none", "", set()),
    ],
)
def test_n8_the_drivers_own_tools_are_asked(monkeypatch, tool, output, expected):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if name == tool else None)
    monkeypatch.setattr(doctor.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, output))
    assert doctor.accelerators() == expected


def test_a_driver_that_hangs_is_no_device(monkeypatch):
    def hang(command, **_):
        raise subprocess.TimeoutExpired(command, 10)

    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor.subprocess, "run", hang)
    assert doctor.accelerators() == set()


@pytest.mark.parametrize("wanted", [">=2.9", "<3,>=2.10", ">=0.1", "", ">=3.11"])
@pytest.mark.parametrize("found", ["2.9", "2.9.1+rocm6.4", "2.10.0", "3.0", "0.0.9", "3.11.7", "2.13.0+cpu"])
def test_ranges_are_read_as_packaging_reads_them(found, wanted):
    assert doctor.satisfies(found, wanted) == SpecifierSet(wanted).contains(Version(found))


def test_this_environment_is_well():
    checks = {check.name: check for check in doctor.examine()}
    assert not checks["python"].remedy
    assert not checks["packages"].remedy, checks["packages"].found
    assert "hub" not in checks  # nothing asks the network unless told to


def test_a_package_out_of_its_range_is_named(monkeypatch):
    real = metadata.version
    old = {"pyarrow": "3.0"}
    monkeypatch.setattr(doctor.metadata, "version", lambda name: old.get(name) or real(name))
    check = next(c for c in doctor.examine() if c.name == "packages")
    assert "pyarrow 3.0 is not >=" in check.found
    assert "leaves torch alone" in check.remedy


def test_a_package_that_is_missing_is_named(monkeypatch):
    needs = doctor.Declared("1.0", ">=3.11", ("torch>=2.9", "no-such-package>=1"))
    monkeypatch.setattr(doctor, "declared", lambda: needs)
    check = next(c for c in doctor.examine() if c.name == "packages")
    assert "no-such-package is missing" in check.found


def test_without_an_installation_the_checkouts_own_file_is_read(monkeypatch, tmp_path):
    def nothing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "metadata", nothing)
    assert doctor.declared().python.startswith(">=3.")
    assert any(need.startswith("torch>=") for need in doctor.declared().packages)
    monkeypatch.setattr(doctor, "home", lambda: tmp_path)
    with pytest.raises(UserError, match="pip install -e"):
        doctor.declared()


def test_a_full_disk_is_said(monkeypatch):
    usage = doctor.shutil.disk_usage("/")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    remedies = [check.remedy for check in doctor.examine() if check.name in ("cache", "runs")]
    assert ["NANOLEARN_CACHE" in remedies[0], "NANOLEARN_RUNS" in remedies[1]] == [True, True]


def test_a_hub_out_of_reach_is_one_line(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:9")
    check = doctor.examine(online=True)[-1]
    assert check.name == "hub"
    assert "HF_ENDPOINT" in check.remedy
    assert "\n" not in check.found
