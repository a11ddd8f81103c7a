"""exec/env/install.py: which torch an environment gets, and that an installed one is never replaced (N8)."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "exec/env/install.py"

spec = importlib.util.spec_from_file_location("install", SCRIPT)
install = importlib.util.module_from_spec(spec)
sys.modules["install"] = install  # dataclasses looks its module up there
spec.loader.exec_module(install)

ROCM = install.Torch("2.9.1+rocm6.4", hip="6.4", device="cuda")
CUDA = install.Torch("2.13.0", cuda="13.0", device="cuda")
APPLE = install.Torch("2.13.0", device="mps")
CPU = install.Torch("2.13.0+cpu")
CUDA_WITHOUT_DEVICE = install.Torch("2.13.0", cuda="13.0")
URL = "https://example.invalid/whl/rocm"
PINS = "numpy==2.4.6\ntorch==2.13.0\ntqdm==4.70.1\n"


def choose(wanted, inside=None, outside=None, **rest):
    return install.choose(wanted, inside=inside, outside=outside, **{"platform": "linux", **rest})


@pytest.mark.parametrize("found", [ROCM, CUDA, APPLE], ids=["rocm", "cuda", "apple"])
def test_auto_keeps_an_installed_torch_that_sees_a_device(found):
    choice = choose("auto", outside=found, card="nvidia")
    assert (choice.source, choice.system_site, choice.pinned) == ("keep", True, False)
    assert found.version in choice.reason


@pytest.mark.parametrize(
    ("card", "outside", "url", "source", "build", "pinned"),
    [
        ("", None, "", "plain", "", True),
        (
            "",
            CPU,
            "",
            "plain",
            "",
            True,
        ),  # an installed torch without a device is no reason to share packages
        ("", CUDA_WITHOUT_DEVICE, "", "plain", "", True),
        ("nvidia", None, "", "plain", "cuda", False),
        ("nvidia", CPU, "", "plain", "cuda", False),
        ("nvidia", None, URL, "index", "cuda", False),
        ("amd", None, URL, "index", "rocm", False),
        ("", None, URL, "index", "", False),
    ],
)
def test_auto_takes_the_wheel_for_what_is_there(card, outside, url, source, build, pinned):
    choice = choose("auto", outside=outside, card=card, index_url=url)
    assert (choice.source, choice.build, choice.pinned) == (source, build, pinned)
    assert not choice.system_site


@pytest.mark.parametrize(
    ("wanted", "card", "platform"),
    [("rocm", "", "linux"), ("auto", "amd", "linux"), ("cuda", "nvidia", "win32"), ("rocm", "", "win32")],
)
def test_a_build_that_needs_an_index_is_refused_without_one(wanted, card, platform):
    with pytest.raises(install.Refused, match=r"set TORCH_INDEX_URL to the index URL .*pytorch\.org"):
        choose(wanted, card=card, platform=platform)


@pytest.mark.parametrize("wanted", ["cuda", "rocm"])
def test_macos_has_one_build(wanted):
    with pytest.raises(install.Refused, match="TORCH=auto"):
        choose(wanted, platform="darwin", index_url=URL)


def test_system_needs_a_torch_that_works():
    assert choose("system", outside=CPU).source == "keep"  # asked for by name, so without a device too
    with pytest.raises(install.Refused, match="has no torch"):
        choose("system")
    with pytest.raises(install.Refused, match="can't be imported .libamdhip64"):
        choose("system", outside=install.Torch("2.9.1+rocm6.4", fault="libamdhip64.so is missing"))


def test_a_torch_that_is_too_old_is_refused_not_upgraded():
    old = install.Torch("2.8.0+rocm6.3", hip="6.3", device="cuda")
    for place in ("inside", "outside"):
        with pytest.raises(install.Refused, match=r"older than 2\.9"):
            choose("auto", **{place: old})


@pytest.mark.parametrize("wanted", ["auto", "cpu", "cuda", "rocm", "system"])
@pytest.mark.parametrize("inside", [ROCM, CUDA, CPU, APPLE], ids=["rocm", "cuda", "cpu", "apple"])
@pytest.mark.parametrize("card", ["", "nvidia", "amd"])
def test_n8_a_torch_inside_the_environment_stays_or_this_refuses(wanted, inside, card):
    mismatch = wanted in ("cuda", "rocm") and inside.build != wanted
    useless = wanted == "auto" and not inside.device and card
    if mismatch or useless:
        with pytest.raises(install.Refused, match="delete the environment"):
            choose(wanted, inside=inside, outside=CUDA, card=card, index_url=URL)
    else:
        choice = choose(wanted, inside=inside, outside=CUDA, card=card, index_url=URL)
        assert (choice.source, choice.pinned) == ("keep", False)


def test_a_torch_that_fits_no_device_here_is_refused_with_a_way_out():
    with pytest.raises(install.Refused, match="keep it with TORCH=cpu"):
        choose("auto", inside=CPU, card="nvidia")
    with pytest.raises(install.Refused, match="a rocm build is needed"):
        choose("rocm", inside=CUDA)
    with pytest.raises(install.Refused, match="a working one is needed"):
        choose("auto", inside=install.Torch("2.9.1+rocm6.4", fault="libamdhip64.so is missing"))


def test_pip_sees_a_pin_of_torch_only_where_the_pinned_torch_is_the_choice():
    assert install.constraints_for(choose("cpu"), PINS) == PINS
    for choice in (choose("cuda"), choose("rocm", index_url=URL), choose("system", outside=CPU)):
        assert install.constraints_for(choice, PINS) == "numpy==2.4.6\ntqdm==4.70.1\n"


def test_an_index_of_torch_builds_is_asked_for_torch_alone():
    first, second = install.pip_commands(choose("rocm", index_url=URL), "python", Path("pins"), ["dev"])
    assert first[first.index("--index-url") + 1] == URL
    assert first[-1] == "torch>=2.9"
    assert "--index-url" not in second
    assert second[-1].endswith("[dev]")
    assert not any("extra-index-url" in word for word in first + second)


def test_verify_stops_when_pip_brought_another_torch():
    keep = choose("auto", outside=ROCM)
    assert install.verify(ROCM, ROCM, keep) == "torch 2.9.1+rocm6.4 (rocm build, sees cuda)"
    with pytest.raises(install.Refused, match="was to be kept"):
        install.verify(ROCM, CPU, keep)
    with pytest.raises(install.Refused, match="a cuda build was asked for"):
        install.verify(None, CPU, choose("cuda"))
    with pytest.raises(install.Refused, match="found None"):
        install.verify(None, None, choose("cpu"))


def test_the_oldest_torch_is_that_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, install.OLDEST))
    assert f"torch>={oldest}" in project["dependencies"]


# From here on with real environments and a real pip; the torch is a stand-in, and nothing is fetched.

ROCM_STAND_IN = """
from types import SimpleNamespace
__version__ = "2.9.1+rocm6.4"
version = SimpleNamespace(cuda=None, hip="6.4.43482")
cuda = SimpleNamespace(is_available=lambda: True)
backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: False))
"""


def environment_with_rocm_torch(place: Path) -> str:
    venv.create(place, with_pip=False)
    python = install._python(place)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip())
    (packages / "torch").mkdir()
    (packages / "torch/__init__.py").write_text(ROCM_STAND_IN)
    metadata = packages / "torch-2.9.1+rocm6.4.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1+rocm6.4\n")
    (metadata / "RECORD").write_text("torch/__init__.py,,\n")
    return python


def wheel(house: Path, name: str, version: str) -> None:
    house.mkdir(exist_ok=True)
    with zipfile.ZipFile(house / f"{name}-{version}-py3-none-any.whl", "w") as file:
        info = f"{name}-{version}.dist-info"
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def would_install(python: str, constraints: Path, house: Path, report: Path) -> dict[str, str]:
    requirements = ["torch>=" + ".".join(map(str, install.OLDEST)), "numpy>=2.0"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--dry-run", "--quiet", "--no-index"]
    subprocess.run(
        [*pip, "--find-links", str(house), "--report", str(report), "-c", str(constraints), *requirements],
        env={**clean, "PIP_CONFIG_FILE": os.devnull},
        check=True,
    )
    items = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in items}


def test_n8_pip_leaves_a_rocm_torch_alone_with_our_constraints_and_only_with_them(tmp_path):
    """Both halves: what we hand to pip keeps the ROCm build; the plain constraints.txt would replace it."""
    python = environment_with_rocm_torch(tmp_path / "user")
    wheel(tmp_path / "house", "torch", "2.13.0")
    wheel(tmp_path / "house", "numpy", "2.4.6")
    pins = tmp_path / "constraints.txt"
    pins.write_text("torch==2.13.0\nnumpy==2.4.6\n")
    ours = tmp_path / "ours.txt"
    ours.write_text(install.constraints_for(choose("auto", inside=install.probe(python)), pins.read_text()))
    report = tmp_path / "report.json"
    assert would_install(python, ours, tmp_path / "house", report) == {"numpy": "2.4.6"}
    assert would_install(python, pins, tmp_path / "house", report) == {"numpy": "2.4.6", "torch": "2.13.0"}


def run_install(python: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    keep = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run([python, str(SCRIPT), *arguments], capture_output=True, text=True, env=keep)


def test_n8_the_documented_command_keeps_the_torch_of_the_python_that_runs_it(tmp_path):
    python = environment_with_rocm_torch(tmp_path / "user")
    done = run_install(python, "--dry-run", "--venv", str(tmp_path / "new"))
    assert "torch: keep, already installed: torch 2.9.1+rocm6.4 (rocm build, sees cuda)" in done.stdout
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_torch_in_another_virtual_environment_is_seen_from_the_new_one(tmp_path):
    user = environment_with_rocm_torch(tmp_path / "user")
    new = tmp_path / "new"
    outside = install.probe(user)
    assert (outside.version, outside.build, outside.device) == ("2.9.1+rocm6.4", "rocm", "cuda")
    install.make_environment(new, choose("auto", outside=outside), outside)
    inside = install.probe(install._python(new))
    assert install.verify(outside, inside, choose("auto", outside=outside)) == str(outside)


def test_rocm_without_an_index_stops_with_one_line(tmp_path):
    venv.create(tmp_path / "user", with_pip=False)
    python = install._python(tmp_path / "user")
    done = run_install(python, "--torch", "rocm", "--venv", str(tmp_path / "new"))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"install: .*TORCH_INDEX_URL.*\n", done.stderr)


def test_an_installed_environment_is_left_alone(tmp_path, monkeypatch):
    new = tmp_path / "new"
    venv.create(new, with_pip=False)
    text = (ROOT / "constraints.txt").read_text() + (ROOT / "pyproject.toml").read_text()
    digest = install.hashlib.sha256(text.encode()).hexdigest()
    stamp = {"digest": digest, "wanted": "rocm", "extras": ["dev"]}
    (new / install.STAMP).write_text(json.dumps(stamp))
    monkeypatch.setattr(install, "probe", lambda python: pytest.fail("torch was looked for again"))
    install.install("auto", [], new, dry_run=False)  # auto is whatever was chosen before
    install.install("rocm", ["dev"], new, dry_run=False)
    with pytest.raises(pytest.fail.Exception):
        install.install("auto", ["book"], new, dry_run=False)  # another extra is work to do
    with pytest.raises(pytest.fail.Exception):
        install.install("cuda", [], new, dry_run=False)


@pytest.mark.parametrize(
    ("tool", "answer", "card"),
    [
        ("nvidia-smi", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)", "nvidia"),
        ("rocminfo", "  Name:                    gfx942", "amd"),
        ("nvidia-smi", "No devices were found", ""),
        (None, "", ""),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="the stand-in for the vendor's tool is a shell script")
def test_cards_are_found_by_the_vendors_own_tool(tmp_path, monkeypatch, tool, answer, card):
    if tool:
        (tmp_path / tool).write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.find_card() == card
