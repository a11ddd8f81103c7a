"""Graded problems: the machinery on a made-up one, and what every real one is held to."""

import ast
import json

import pytest

from nanolearn.course import problems
from nanolearn.course.problems import Problem
from nanolearn.errors import UserError
from nanolearn.paths import home

ALL = problems.find_all()
FEWEST_WRONG, TIMES = 3, 3


@pytest.fixture
def made(tmp_path) -> Problem:
    """A problem about doubling."""
    folder = tmp_path / "99_twice" / "double"
    (folder / "staff").mkdir(parents=True)
    (folder / "problem.json").write_text(
        json.dumps({"title": "Twice", "minutes": 5, "points": {"check_two": 2, "check_zero": 1}})
    )
    (folder / "README.md").write_text("Double it.")
    (folder / "checks.py").write_text(
        "def check_two(answer):\n    '''one gives two'''\n    assert answer.double(1) == 2, 'think of 1 + 1'\n"
        "def check_zero(answer):\n    assert answer.double(0) == 0\n"
    )
    return problems.load(folder)


def verdicts(problem, tmp_path, code):
    path = tmp_path / "mine.py"
    path.write_text(code)
    return [(v.passed, v.refused, v.message) for v in problems.judge(problem, path)]


def test_a_right_answer_passes_every_check(made, tmp_path):
    assert verdicts(made, tmp_path, "def double(x):\n    return 2 * x") == [
        (True, False, "one gives two"),
        (True, False, ""),
    ]


def test_a_wrong_answer_is_refused_with_the_idea(made, tmp_path):
    found = verdicts(made, tmp_path, "def double(x):\n    return x * x")
    assert found[0] == (False, True, "think of 1 + 1")
    assert found[1][0]


@pytest.mark.parametrize(
    "code, said",
    [
        ("def double(x):\n    raise NotImplementedError", "not written yet"),
        ("def double(x):\n    return [][x]", "IndexError: list index out of range (line 2 of mine.py)"),
        ("", "AttributeError: module 'answer_double' has no attribute 'double'"),
        ("def double(x)", "the file can't be imported: SyntaxError"),
    ],
)
def test_an_answer_that_breaks_is_no_answer_and_says_where(made, tmp_path, code, said):
    for passed, refused, message in verdicts(made, tmp_path, code):
        assert not passed and not refused
        assert message.startswith(said)


def test_an_answer_is_read_anew_each_time(made, tmp_path):
    assert not verdicts(made, tmp_path, "def double(x):\n    return 3 * x")[0][0]
    assert verdicts(made, tmp_path, "def double(x):\n    return 2 * x")[0][0]


def test_a_wrong_answer_is_the_reference_with_changes_that_fit(made):
    (made.folder / "staff" / "reference.py").write_text("def double(x):\n    return 2 * x\n")
    told = made.folder / "staff" / "wrong.toml"
    told.write_text("[square]\nwhy = 'it squares'\nchanges = [['2 * x', 'x * x']]\n")
    (wrong,) = made.wrong
    assert (wrong.name, wrong.code) == ("square", "def double(x):\n    return x * x\n")
    told.write_text("[square]\nwhy = 'it squares'\nchanges = [['3 * x', 'x * x']]\n")
    with pytest.raises(ValueError, match="0 places"):
        _ = made.wrong


def test_a_problem_that_is_not_there_is_refused_with_the_nearest(made):
    with pytest.raises(UserError, match="did you mean 99_twice/double"):
        problems.find("99_twice/duble", made.folder.parent.parent)


def test_checks_without_points_and_a_broken_description_are_refused(made):
    (made.folder / "checks.py").write_text("def check_other(answer):\n    pass\n")
    with pytest.raises(UserError, match="give points to the same ones"):
        problems.checks(made)
    (made.folder / "problem.json").write_text('{"title": "Twice", "minutes": -1, "points": {"a": 1}}')
    with pytest.raises(UserError, match="minutes=-1"):
        problems.load(made.folder)


@pytest.mark.parametrize("problem", ALL, ids=lambda problem: problem.name)
class TestEveryProblem:
    def test_it_belongs_to_a_chapter_and_is_all_there(self, problem):
        assert problem.folder.parent.name in {chapter.stem for chapter in (home() / "book" / "chapters").glob("*.md")}
        assert len(problem.statement.split()) > 50
        assert len(problem.wrong) >= FEWEST_WRONG
        assert all(wrong.why for wrong in problem.wrong)
        assert ast.get_docstring(ast.parse(problem.reference.read_text()))

    def test_the_stub_fails_every_check(self, problem):
        assert not any(verdict.passed for verdict in problems.judge(problem, problem.folder / problems.STUB))

    def test_the_reference_passes_every_time(self, problem):
        for _ in range(TIMES):
            assert [v.message for v in problems.judge(problem, problem.reference) if not v.passed] == []

    def test_every_wrong_answer_is_refused_by_an_assertion(self, problem, tmp_path):
        for wrong in problem.wrong:
            path = tmp_path / f"{wrong.name}.py"
            path.write_text(wrong.code)
            found = problems.judge(problem, path)
            assert any(verdict.refused for verdict in found), f"{wrong.name}: {[v.message for v in found]}"
