"""The scripts around a run, with everything they call replaced: what is requeued, what is handed on, what is set."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from nanolearn.train.outcome import GO_ON

EXEC = Path(__file__).parents[2] / "exec"
SETTINGS = {"TORCHINDUCTOR_CACHE_DIR", "NCCL_DEBUG"}
NANOLEARN = """#!/bin/sh
if [ "$1" = join ]; then trap 'echo left >> calls; exit 75' TERM; fi
echo "$@" >> calls
if [ "$1" = join ]; then
    n=0
    while [ -n "$WAITS" ] && [ $n -lt 200 ]; do sleep 0.1; n=$((n + 1)); done
    exit 0
fi
trap 'echo term >> calls; exit 75' TERM
n=0 # a run ends after the other node has come, as it does where both train
while [ -n "$MEETS" ] && ! grep -q '^join' calls && [ $n -lt 100 ]; do sleep 0.1; n=$((n + 1)); done
n=0
while [ -n "$SLEEP" ] && [ $n -lt 100 ]; do sleep 0.1; n=$((n + 1)); done
exit "${CODE:-0}"
"""
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then printf 'node-a\\nnode-b\\n'; else echo "scontrol $*" >> calls; fi
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder with a nanolearn, an srun and an scontrol that write down how they were called."""
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name, text in {"nanolearn": NANOLEARN, "srun": SRUN, "scontrol": SCONTROL}.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}
    for name, value in (job | {"SLURM_JOB_NODELIST": "node-[a-b]"}).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def sbatch(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = ["bash", str(EXEC / "slurm" / script), *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60)


ARGUMENTS = {"one_node.sbatch": ["-p", "depth", "4"], "nodes.sbatch": ["runs/a", "-p", "depth", "4"]}


@pytest.mark.parametrize("script", ARGUMENTS)
@pytest.mark.parametrize(
    ("code", "requeued", "exits"), [(0, False, 0), (75, True, 0), (1, False, 1), (138, False, 138)]
)
def test_only_what_wants_to_go_on_is_requeued(checkout, script, code, requeued, exits):
    done = sbatch(script, *ARGUMENTS[script], CODE=str(code))
    assert done.returncode == exits, done.stderr
    assert ("scontrol requeue 17" in (checkout / "calls").read_text()) == requeued


def test_a_run_that_stops_at_every_start_is_not_requeued_for_ever(checkout):
    assert sbatch("one_node.sbatch", CODE="75", SLURM_RESTART_COUNT="50").returncode == 75
    assert "requeue" not in (checkout / "calls").read_text()


@pytest.mark.parametrize("script", ARGUMENTS)
def test_term_is_handed_on_and_the_save_is_waited_for(checkout, script):
    command = ["bash", str(EXEC / "slurm" / script), *ARGUMENTS[script]]
    job = subprocess.Popen(command, env=os.environ | {"SLEEP": "1"}, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while "run 07" not in (checkout / "calls").read_text() if (checkout / "calls").exists() else True:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 0
    assert (checkout / "calls").read_text().splitlines()[-2:] == ["term", "scontrol requeue 17"]


def test_several_nodes_are_told_of_each_other(checkout):
    assert sbatch("nodes.sbatch", "runs/a", "-p", "depth", "24", OVERRIDES="ratio=8", MEETS="1").returncode == 0
    calls = set((checkout / "calls").read_text().splitlines())
    wishes = "ratio=8 nodes=2 rendezvous=node-a:29500"
    assert calls - {"left"} == {"join runs/a", f"run 07 -p depth 24 -r run_dir runs/a -r overrides {wishes}"}
    assert sbatch("nodes.sbatch", "-f", "x.yaml").returncode == 2


@pytest.mark.parametrize(("code", "exits"), [(2, 2), (75, 0)])
def test_nodes_that_still_wait_do_not_hold_a_job_whose_run_ended(checkout, code, exits):
    begun = time.monotonic()
    assert sbatch("nodes.sbatch", "runs/a", CODE=str(code), WAITS="1", MEETS="1").returncode == exits
    assert time.monotonic() - begun < 10  # a waiting node would hold it for 20 s here, for two hours there
    calls = (checkout / "calls").read_text()
    assert "left" in calls
    assert ("scontrol requeue 17" in calls) == (code == 75)


@pytest.mark.parametrize("name", ["nvidia.sh", "mi300x.sh"])
def test_a_device_script_sets_what_it_explains_and_keeps_what_is_set(name):
    script = EXEC / "env" / name
    listed = ["sh", "-eu", "-c", f". {script}; env"]
    bare = {"PATH": os.environ["PATH"], "HOME": "/nowhere"}
    before = set(subprocess.run(["sh", "-c", "env"], env=bare, capture_output=True, text=True).stdout.split())
    after = set(subprocess.run(listed, env=bare, capture_output=True, text=True, check=True).stdout.split())
    assert {line.split("=")[0] for line in after - before} == SETTINGS
    assert set(re.findall(r"^export (\w+)=", script.read_text(), re.M)) == SETTINGS
    kept = subprocess.run(listed, env=bare | {"NCCL_DEBUG": "INFO"}, capture_output=True, text=True, check=True).stdout
    assert "NCCL_DEBUG=INFO" in kept.split()


def test_what_the_published_run_set_without_need_is_explained_and_not_set():
    text = (EXEC / "env" / "mi300x.sh").read_text()
    for name in ("HSA_OVERRIDE_GFX_VERSION", "PYTORCH_ALLOC_CONF", "HIP_VISIBLE_DEVICES"):
        assert f"# - {name}" in text
        assert f"export {name}" not in text


def test_the_cloud_file_calls_what_is_there(root):
    task = yaml.safe_load((EXEC / "cloud" / "sky.yaml").read_text())
    assert set(task) == {"name", "workdir", "resources", "file_mounts", "envs", "setup", "run"}
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [GO_ON]}
    for path in re.findall(r"exec/[\w./-]+", task["setup"] + task["run"]):
        assert (root / path).exists(), path
    assert re.search(r"^\.venv/bin/nanolearn run 07 ", task["run"], re.M)


def test_the_page_names_every_file_and_no_other(root):
    page = (EXEC / "README.md").read_text()
    files = {path.relative_to(EXEC).as_posix() for path in EXEC.rglob("*") if path.is_file()} - {"README.md"}
    recipes = {name for name in files if name.startswith("recipes/")}
    assert files - recipes <= set(re.findall(r"`([\w/.-]+)`", page))
    for path in re.findall(r"exec/[\w/.-]+\.(?:sh|sbatch|ya?ml|py)", page):
        assert (root / path).exists(), path
