"""Promise 2: killed at any instant, also inside a save, a run goes on as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanolearn.train.records import read
from tests.ranks import ROOT
from tests.train.conftest import Tiny, losses, rows

SCRIPT = Path(__file__).with_name("kill_script.py")
STEPS, SAVE_EVERY = 320, 5
# Small rates: at the usual ones this run is chaotic, and a rounding error grows ten thousandfold in 80 steps.
CALM = {
    "rate_matrix": 0.001,
    "rate_token_table": 0.02,
    "rate_value_tables": 0.01,
    "rate_head": 0.0005,
    "rate_x0": 0.005,
}


def killed(tiny: Tiny, run: Path, seed: int, counts: list[int]) -> list[dict]:
    """Run the script in `run`; what it told of each kill."""
    run.mkdir()
    tiny.recipe(steps=STEPS, **CALM).save(run / "recipe.json")
    tiny.execution(micro_batch=2, save_every=SAVE_EVERY, sample_every=STEPS).save(run.with_suffix(".execution"))
    tiny.tokenizer.save(run.with_suffix(".tokenizer"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), str(run), str(seed), *map(str, counts)]
    child = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert child.returncode == 0, child.stderr[-3000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


def undisturbed(tiny: Tiny, folder: Path) -> list[float]:
    tiny.train(folder, tiny.recipe(steps=STEPS, **CALM), micro_batch=2, save_every=SAVE_EVERY, sample_every=STEPS)
    return losses(folder)


def history_is_whole(run: Path) -> None:
    """Every row exactly once, in order; every step once; nothing half-written is left."""
    assert rows(run) == [8 * step for step in range(STEPS)]
    assert [record["step"] for record in read(run, "step")] == list(range(1, STEPS + 1))
    assert json.loads((run / "result.json").read_text())["complete"]
    assert not list((run / "checkpoints").glob(".writing-*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_twenty_times_on_changing_numbers_of_ranks(tiny, tmp_path):
    """C1 C2 C3: SIGKILL at 20 random instants, half of them inside a save, on 1, 2 and 4 ranks in turn."""
    counts = [2, 1, 4, 1, 2, 4, 2] * 3
    expected = undisturbed(tiny, tmp_path / "alone")
    told = killed(tiny, tmp_path / "run", 0, counts)
    assert len(told) == 20
    assert sum(kill["writing"] for kill in told) >= 5
    history_is_whole(tmp_path / "run")
    # Promised is 1e-3. In so calm a run sums in another order do 3e-7; a state that was lost would do more than 1e-5.
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_on_one_number_of_ranks_the_losses_are_bit_equal(tiny, tmp_path, ranks):
    killed(tiny, tmp_path / "quiet", 0, [ranks])
    told = killed(tiny, tmp_path / "run", ranks, [ranks] * 7)
    assert len(told) == 6
    history_is_whole(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "quiet")
