"""Headless jobs that are stopped, killed and broken: real kernels, executed through papermill."""

import json
import os
import signal

import nbformat
import psutil
import pytest

from nanolearn.train.outcome import GO_ON
from nanolearn.train.records import read
from tests.faults.jobs import LONG, SHAPE, Job, alive, wait

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    jobs = []

    def begin(overrides: str, *flags: str, **environment: str) -> Job:
        jobs.append(Job(tmp_path, overrides, *flags, **environment))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            for process in job.processes():
                process.kill()


@pytest.mark.parametrize("devices", [1, 2])
def test_sigterm_saves_reports_and_ends_with_75(start, devices):
    job = start(f"{LONG} num_devices={devices}")
    job.until_step(2)
    processes = job.processes()
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == GO_ON, job.text()
    result = json.loads((job.run_dir / "result.json").read_text())
    assert not result["complete"]
    assert read(job.run_dir, "checkpoint")[-1]["step"] == result["steps"]
    assert "the run was stopped" in str(nbformat.read(job.out, as_version=4))  # the report was still written
    wait(lambda: not alive(processes), 10)


def test_slurm_signals_every_process_of_a_job_at_once(start):
    job = start(f"{LONG} num_devices=2")
    job.until_step(2)
    for process in reversed(job.processes()):
        process.send_signal(signal.SIGTERM)
    assert job.end() == GO_ON, job.text()
    saved = read(job.run_dir, "checkpoint")
    assert saved[-1]["step"] == read(job.run_dir, "step")[-1]["step"]


def test_a_signal_before_the_run_has_begun_is_75_too(start):
    job = start(LONG)
    wait(lambda: len(job.processes()) > 2, 60, job.text)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == GO_ON, job.text()


def test_a_complete_run_is_0_and_one_that_the_clock_stopped_is_75(start):
    assert start(f"{SHAPE} steps=3").end() == 0
    job = start(f"{SHAPE} steps=4 max_hours=0.001", "-p", "resume", "False")
    assert job.end() == GO_ON, job.text()


@pytest.mark.parametrize("which", ["kernel", "job"])
def test_n4_ten_seconds_after_a_kill_no_process_is_left(start, which):
    job = start(f"{LONG} num_devices=2")
    job.until_step(2)
    processes = job.processes()
    names = [" ".join(p.cmdline()) for p in processes]
    assert sum("nanolearn.train.launch" in name and "agent" not in name for name in names) == 2
    (job.kernel() if which == "kernel" else job.process).send_signal(signal.SIGKILL)
    wait(lambda: not alive(processes), 10, lambda: str(alive(processes)))
    assert job.end() not in (0, GO_ON)
    # Its workers were told by the agent that outlived it, and saved.
    assert read(job.run_dir, "checkpoint")[-1]["step"] == read(job.run_dir, "step")[-1]["step"]


def test_n4_an_interrupted_kernel_lets_its_workers_save_and_leaves_none(start):
    job = start(f"{LONG} num_devices=2")
    job.until_step(2)
    kernel = job.kernel()
    workers = kernel.children(recursive=True)
    assert len(workers) >= 3
    kernel.send_signal(signal.SIGINT)
    wait(lambda: not alive(workers), 10, lambda: str(alive(workers)))
    assert job.end() == GO_ON
    assert read(job.run_dir, "checkpoint")


BROKEN = """
import os, time
if os.environ.get("RANK") == "1":
    import nanolearn.data.loader as loader

    plain = loader.Loader.micro_batches

    def micro_batches(self, *given):
        for number, batch in enumerate(plain(self, *given)):
            if number == 5:
                FAULT
            yield batch

    loader.Loader.micro_batches = micro_batches
"""


def broken(start, folder, fault: str, overrides: str) -> tuple[int, str]:
    """A job whose rank 1 meets a fault in its sixth batch: its exit code, and what its last error says."""
    (folder / "sitecustomize.py").write_text(BROKEN.replace("FAULT", fault))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    job = start(f"{LONG} num_devices=2 {overrides}", PYTHONPATH=path)
    code = job.end(120)
    errors = [o for c in nbformat.read(job.out, as_version=4).cells for o in c.get("outputs", []) if "ename" in o]
    return code, " ".join([errors[-1].ename, errors[-1].evalue, *errors[-1].traceback])


def test_a_failed_workers_own_traceback_is_in_the_cell_and_the_job_fails(start, tmp_path):
    code, said = broken(start, tmp_path, 'raise ZeroDivisionError("rank 1 divided by zero")', "")
    assert code == 1, said
    assert "ZeroDivisionError: rank 1 divided by zero" in said
    assert "micro_batches" in said


def test_a_stalled_rank_is_named_in_the_cell_and_the_job_may_be_started_again(start, tmp_path):
    code, said = broken(start, tmp_path, "time.sleep(600)", "stall_minutes=0.05 save_every=2")
    assert code == GO_ON, said
    assert "Stalled" in said
    assert "behind: rank 1 of 2" in said
    assert "data)" in said
    assert "the same command goes on from step_0000000" in said


def test_a_detached_run_outlives_its_starter_and_a_second_notebook_only_watches_it(start, tmp_path):
    job = start(LONG, "--detach")
    assert job.end(120) == 0, job.text()
    said = job.text()
    detached = psutil.Process(int(said.split("process ")[1].split(",")[0]))
    try:
        assert str(job.run_dir) in said
        assert f"kill {detached.pid}" in said
        assert os.getsid(detached.pid) == detached.pid
        watcher = Job(tmp_path / "watcher", "", run_dir=job.run_dir)  # other parameters: the run's own are taken
        wait(lambda: "this one only watches" in watcher.text(), 60, watcher.text)
        before = len(read(job.run_dir, "step"))
        watcher.process.send_signal(signal.SIGINT)
        watcher.end()
        assert "the run goes on" in watcher.text()
        wait(lambda: len(read(job.run_dir, "step")) > before + 10, 30)
        assert not (job.run_dir / "result.json").exists()
    finally:
        detached.terminate()
        detached.wait(60)
    assert read(job.run_dir, "end")[-1]["stopped"] == "SIGINT"
    assert read(job.run_dir, "checkpoint")
