"""Parameters: what papermill injects is held to what the notebook declares."""

import subprocess
import sys

import pytest
from papermill.translators import PythonTranslator

from nanolearn.errors import UserError
from nanolearn.lab import params

DECLARED = """\
depth: int = 4  # layers
rate: float = 0.5  # peak
preset: str = "auto"  # size
resume: bool = True  # go on
"""


def run(**injected):
    """The namespace after papermill's own translator wrote the injected cell, checked."""
    cell = PythonTranslator.codify(injected) if injected else ""
    namespace = {"In": ["", DECLARED, *([cell] if cell else []), "params.check(globals())"]}
    exec(DECLARED, namespace)
    exec(cell, namespace)
    return params.check(namespace), namespace


def test_defaults_pass_where_nothing_is_injected():
    checked, _ = run()
    assert checked == {"depth": 4, "rate": 0.5, "preset": "auto", "resume": True}


@pytest.mark.parametrize(
    ("name", "nearest"), [("dept", "depth"), ("Depth", "depth"), ("resum", "resume"), ("pre_set", "preset")]
)
def test_n1_an_unknown_name_is_refused_with_the_nearest_right_one(name, nearest):
    with pytest.raises(UserError, match=f"did you mean '{nearest}'"):
        run(**{name: 24})


def test_n1_a_name_like_no_other_lists_what_there_is():
    with pytest.raises(UserError, match="use depth, rate, preset, resume"):
        run(zzz=1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rate": 2}, 2.0),
        ({"resume": "true"}, True),
        ({"resume": "False"}, False),
        ({"rate": 1e-3}, 1e-3),
        ({"depth": 24}, 24),
    ],
)
def test_values_are_brought_to_the_declared_type(given, expected):
    checked, namespace = run(**given)
    (name,) = given
    assert checked[name] == expected
    assert type(checked[name]) is type(expected)
    assert namespace[name] == expected
    assert type(namespace[name]) is type(expected)


@pytest.mark.parametrize(
    "given",
    [
        *({"depth": value} for value in (24.0, "24", True, None)),
        *({"rate": value} for value in ("0.1", True)),
        *({"resume": value} for value in ("yes", 1)),
        *({"preset": value} for value in (7, None, ["full"])),
    ],
)
def test_other_types_are_refused_in_one_line(given):
    (name,) = given
    with pytest.raises(UserError, match=f"parameter {name} = ") as refused:
        run(**given)
    assert "\n" not in str(refused.value)


def test_a_number_for_text_names_papermills_raw_option():
    with pytest.raises(UserError, match="papermill: -r preset 7"):
        run(preset=7)


def test_papermills_own_names_are_allowed():
    checked, _ = run(PAPERMILL_OUTPUT_PATH="out.ipynb", depth=8)
    assert checked["depth"] == 8
    assert "PAPERMILL_OUTPUT_PATH" not in checked


def test_the_last_injected_cell_counts():
    old, new = "# Parameters\ndept = 24\n", "# Parameters\ndepth = 24\n"
    assert params.injected([DECLARED, old, new]) == ["depth"]


@pytest.mark.parametrize(
    "computed", ["tokens: int = 8 * 256", "tokens: int = BATCH", "tokens: int = len('ab')", "tokens: int"]
)
def test_n2_a_computed_parameter_is_refused(computed):
    with pytest.raises(UserError, match="parameter 'tokens' is computed"):
        params.check({"In": [computed], "tokens": 2048})


def test_a_negative_literal_is_a_literal():
    assert params.declaration(["val_tokens: int = -1"]) == {"val_tokens": "int"}


def test_an_edited_cell_counts_after_it_ran_again():
    assert params.check({"In": ["depth: int = 4", "print(1)", "depth: int = 6"], "depth": 6}) == {"depth": 6}


def test_without_a_declaration_one_line_says_what_to_do():
    with pytest.raises(UserError, match="run the parameters cell first"):
        params.check({"In": ["print(1)", "%%time\nx = 1"]})


def test_it_fails_before_anything_heavy_is_imported():
    heavy = "('torch', 'numpy', 'matplotlib')"
    code = f"import sys, nanolearn.lab.params; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
