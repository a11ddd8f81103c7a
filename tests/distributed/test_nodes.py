"""Two nodes, both on this host: the first launches, the second joins; what they learn is what two ranks learn."""

import signal
import socket
import subprocess
import sys

import pytest

from nanolearn.cli import main
from nanolearn.errors import UserError
from nanolearn.hardware import cpu
from nanolearn.train.launch import launch
from nanolearn.train.outcome import GO_ON
from nanolearn.train.records import finished, read
from tests.faults.jobs import wait
from tests.train.conftest import losses
from tests.train.conftest import tiny as tiny

JOIN = "import sys; from nanolearn.cli import main; sys.exit(main())"
FIRST = """
import sys
from pathlib import Path
from nanolearn.execution import Execution
from nanolearn.hardware import cpu
from nanolearn.recipe import Recipe
from nanolearn.train.launch import launch

given, run = Path(sys.argv[1]), Path(sys.argv[2])
launch(Recipe.load(given / "recipe.json"), Execution.load(given / "execution.json"), run, machine=cpu())
"""


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


class Nodes:
    """The two nodes of one run."""

    def __init__(self, tiny, folder, recipe, **execution) -> None:
        given, self.run = folder / "given", folder / "nodes"
        given.mkdir()
        recipe.save(given / "recipe.json")
        tiny.execution(num_devices=1, nodes=2, **execution).save(given / "execution.json")
        self.second = self._start(JOIN, "join", str(self.run))
        self.first = self._start(FIRST, str(given), str(self.run))

    def _start(self, code: str, *words: str) -> subprocess.Popen:
        command = [sys.executable, "-c", code, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def end(self) -> tuple[int, int, str]:
        """Both exit codes, and what they printed."""
        said = self.first.communicate(timeout=120)[0] + self.second.communicate(timeout=120)[0]
        return self.first.returncode, self.second.returncode, said

    def close(self) -> None:
        """Leave nothing behind."""
        for node in (self.first, self.second):
            node.kill()


@pytest.mark.slow
def test_two_nodes_learn_what_two_ranks_of_one_node_learn(tiny, tmp_path, address):
    recipe = tiny.recipe(steps=6)
    launch(recipe, tiny.execution(num_devices=2), tmp_path / "one", machine=cpu())
    nodes = Nodes(tiny, tmp_path, recipe, rendezvous=address)
    try:
        first, second, said = nodes.end()
    finally:
        nodes.close()
    assert (first, second) == (0, 0), said
    assert finished(nodes.run, recipe.digest).complete
    assert losses(nodes.run) == losses(tmp_path / "one")
    assert read(nodes.run, "start")[0]["ranks"] == 2
    assert main(["join", str(nodes.run)]) == 0  # complete: nothing to join


@pytest.mark.slow
def test_a_further_node_that_is_stopped_stops_the_run_which_goes_on_later(tiny, tmp_path, address):
    recipe = tiny.recipe(steps=100_000)
    nodes = Nodes(tiny, tmp_path, recipe, rendezvous=address, save_every=100_000)
    try:
        wait(lambda: len(read(nodes.run, "step")) > 2, 90)
        nodes.second.send_signal(signal.SIGTERM)
        first, second, said = nodes.end()
    finally:
        nodes.close()
    assert (first, second) == (0, GO_ON), said
    assert read(nodes.run, "checkpoint")[-1]["step"] == read(nodes.run, "end")[-1]["step"] < recipe.steps


@pytest.mark.parametrize(
    ("wish", "said"),
    [({"nodes": 2}, "rendezvous=HOST:29500"), ({"rendezvous": "node0"}, "HOST:PORT"), ({"rendezvous": "a:b"}, "PORT")],
)
def test_nodes_without_a_place_to_meet_are_refused_before_anything(tiny, tmp_path, wish, said):
    with pytest.raises(UserError, match=said):
        launch(tiny.recipe(), tiny.execution(**wish), tmp_path / "run", machine=cpu())
    assert not (tmp_path / "run").exists()


def test_a_run_of_one_node_cannot_be_joined_and_nobody_waits_for_ever(tiny, tmp_path, capsys):
    assert main(["join", str(tmp_path / "nowhere"), "--hours", "0"]) == 2
    assert "did not come" in capsys.readouterr().err
    tiny.recipe().save(tmp_path / "recipe.json")
    tiny.execution().save(tmp_path / "execution.json")
    assert main(["join", str(tmp_path)]) == 2
    assert "is one node's" in capsys.readouterr().err
