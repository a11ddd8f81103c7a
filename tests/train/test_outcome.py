"""How a job ended: the one number that a scheduler sees."""

import json

import pytest

from nanolearn.train.outcome import GO_ON, NOTE, error_line, error_name, exit_code, note, noted


@pytest.fixture
def run(tmp_path):
    def write(complete: bool):
        (tmp_path / "result.json").write_text(json.dumps({"complete": complete}))
        return [tmp_path]

    return write


def test_complete_is_0_stopped_is_75_and_a_failure_stays_what_it_was(run):
    assert exit_code(0, "", run(True), False) == 0
    assert exit_code(0, "", run(False), False) == GO_ON == 75  # max_hours: no signal came
    assert exit_code(0, "", run(False), True) == GO_ON
    assert exit_code(1, "KeyboardInterrupt", [], True) == GO_ON  # told to stop before there was anything to save
    assert exit_code(138, "", [], True) == GO_ON  # the same, and the kernel died of it
    assert exit_code(1, "Stalled", [], False) == GO_ON
    assert exit_code(138, "", [], False) == 138  # a kernel that died by itself
    assert exit_code(1, "Unreachable", [], False) == GO_ON  # the network was gone for long
    assert exit_code(1, "UserError", run(False), True) == 2  # a person has to mend it: starting again does not
    assert exit_code(1, "AssertionError", run(False), True) == 1  # a signal excuses no fault


def test_the_runs_of_a_job_are_noted_once_each_and_only_where_somebody_asks(tmp_path, monkeypatch):
    monkeypatch.delenv(NOTE, raising=False)
    note(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(NOTE, str(tmp_path / "runs"))
    for name in ("a", "b", "a"):
        note(tmp_path / name)
    assert noted(tmp_path / "runs") == [tmp_path / "a", tmp_path / "b"]


def test_the_error_is_the_last_one_in_the_notebook(tmp_path):
    outputs = [{"output_type": "stream"}, {"output_type": "error", "ename": "Stalled"}]
    (tmp_path / "out.ipynb").write_text(json.dumps({"cells": [{}, {"outputs": outputs}, {"outputs": []}]}))
    assert error_name(tmp_path / "out.ipynb") == "Stalled"
    (tmp_path / "out.ipynb").write_text("torn")
    assert error_name(tmp_path / "out.ipynb") == ""


def test_the_line_of_a_mistake_is_told_and_the_stack_of_a_fault_is_not(tmp_path):
    def ended(name, first):
        error = {"output_type": "error", "ename": name, "evalue": "no such corpus", "traceback": [first, "more"]}
        (tmp_path / "out.ipynb").write_text(json.dumps({"cells": [{"outputs": [error]}]}))
        return error_line(tmp_path / "out.ipynb")

    assert ended("UserError", "UserError: no such corpus") == ended("Stalled", "UserError: no such corpus")
    assert ended("UserError", "UserError: no such corpus") == "no such corpus"
    assert ended("ValueError", "-----") == ""
