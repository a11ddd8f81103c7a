"""The command line: exit codes, one line for what a person can cause, and the literal commands of the README."""

import json
import subprocess
import sys

import nbformat
import pytest

from nanolearn import cli, paths
from nanolearn.errors import UserError

H100 = "NVIDIA H100 80GB HBM3"


def run(capsys, *arguments):
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_loads_nothing_heavy():
    code = "import sys; from nanolearn.cli import parser; parser().format_help(); print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'argparse'" in loaded
    assert not [name for name in ("torch", "pyarrow", "pydantic", "numpy") if f"'{name}'" in loaded]


@pytest.mark.parametrize("command", [[], ["plan"], ["data"], ["data", "fetch"], ["run"], ["join"], ["doctor"]])
def test_help_of_every_command(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: nanolearn" in capsys.readouterr().out


def test_the_plan_of_the_readme(capsys):
    code, out, err = run(capsys, "plan", "--depth", "24", "--gpus", "8", "--device", H100)
    assert (code, err) == (0, "")
    for words in ("1,384,122,122", "8,757,706,752 tokens", "8 x NVIDIA H100", "$", "GB", "2.94 h"):
        assert words in out


def test_plan_as_json(capsys):
    arguments = ("--depth", "24", "--gpus", "8", "--device", H100, "--preset", "full", "--ratio", "8", "--price", "2")
    code, out, _ = run(capsys, "plan", *arguments, "--overrides", "window=L micro_batch=8", "--json")
    numbers = json.loads(out)
    assert code == 0
    assert (numbers["recipe"]["window"], numbers["micro_batch"], numbers["num_devices"]) == ("L", 8, 8)
    assert (numbers["recipe"]["ratio"], numbers["price"]) == (8, 2)


def test_plan_with_the_share_that_was_measured(capsys):
    hours = [
        json.loads(run(capsys, "plan", "--depth", "24", "--device", "MI300X", "--json", *more)[1])["hours"]
        for more in ((), ("--mfu", "0.55"))
    ]
    assert hours[0] == pytest.approx(2 * hours[1])


def test_plan_on_a_simulated_machine_says_so(capsys, monkeypatch):
    monkeypatch.setenv("NANOLEARN_SIMULATE", f"8 x {H100}")
    code, out, _ = run(capsys, "plan", "--depth", "24")
    assert code == 0
    assert "(simulated): 8 used" in out


def test_a_refused_plan_is_a_page_and_exit_code_1(capsys):
    code, out, err = run(capsys, "plan", "--depth", "40", "--device", H100)
    assert (code, err) == (1, "")
    assert "REFUSED" in out
    assert "recompute=2" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--device", "H1000"], "did you mean"),
        (["plan", "--depth", "0"], "give a depth"),
        (["plan", "--preset", "huge"], "give auto, full, gpu, laptop"),
        (["plan", "--overrides", "stepz=5"], "did you mean steps"),
        (["plan", "--device", "H100", "--gpus", "0"], "give 1 or more"),
        (["plan", "--device", "8 x H100", "--gpus", "3"], "can't be shared alike"),
        (["plan", "--device", "H100", "--data", "no/such/folder"], "no corpus"),
        (["data", "fetch"], "no corpus is named"),
        (["data", "fetch", "embeded"], "did you mean embedded"),
        (["data", "show", "no/such/file"], "no corpus"),
        (["run", "99"], "no chapter '99'"),
        (["plan", "--mfu", "5"], "give a share of the peak"),
        (["plan", "--mfu", "-1", "--device", "H100"], "give a share of the peak"),
        (["plan", "--overrides", "tracker=foo"], "tensorboard"),
        (["join", "nowhere", "--hours", "-1"], "give how long to wait"),
    ],
)
def test_what_a_person_can_cause_is_one_line_and_exit_code_2(capsys, arguments, said):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_an_interrupt_is_130(monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.doctor, "_doctor", interrupted)
    assert cli.main(["doctor"]) == 130


def test_a_reader_that_leaves_is_no_error():
    command = (
        f"{sys.executable} -c 'import sys; from nanolearn.cli import main; sys.exit(main())' data list | head -c 1"
    )
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_doctor_prints_its_page(capsys, monkeypatch):
    from nanolearn import doctor

    monkeypatch.setattr(doctor, "examine", lambda online: [doctor.Check("a", "well"), doctor.Check("b", "ill", "cure")])
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert out.splitlines()[-1].strip() == "-> cure"


def test_data_list_names_what_is_known(capsys):
    code, out, _ = run(capsys, "data", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()][:3] == ["embedded", "climbmix", "fineweb-edu"]


def test_data_of_ones_own_is_fetched_tokenised_and_shown(capsys, tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text(f"text number {number} about trees and rivers " * 20)
    code, out, _ = run(capsys, "data", "fetch", str(tmp_path))
    assert code == 0
    assert out.count(".parquet") >= 2
    code, out, _ = run(capsys, "data", "tokens", str(tmp_path), "--vocab-size", "280")
    assert code == 0
    assert "bytes a token" in out
    code, out, _ = run(capsys, "data", "show", str(tmp_path), "--documents", "2")
    assert code == 0
    assert out.count("--- document") == 2
    assert "about trees and rivers" in out


def test_a_corpus_of_many_downloads_asks_how_many(monkeypatch):
    class Large:
        name, download_hint = "large", 10**9

        def shards(self, split):
            return ("v",) if split == "val" else tuple(f"t{i}" for i in range(100))

    with pytest.raises(UserError, match=r"100 shards, 100 GB.*--shards"):
        cli.data._wanted(Large(), None)
    assert cli.data._wanted(Large(), 2) == ["v", "t0", "t1"]


@pytest.fixture
def chapter(tmp_path, monkeypatch):
    """A checkout with one small notebook, 07_tiny, that fails at depth 3."""
    cells = [
        nbformat.v4.new_code_cell('depth: int = 4\noverrides: str = ""', metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("assert depth != 3\nprint('depth', depth, repr(overrides))"),
        nbformat.v4.new_code_cell(
            "from nanolearn.errors import UserError\nif depth == 2: raise UserError('2 is few', 'give 4')"
        ),
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    (tmp_path / "notebooks").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "notebooks" / "07_tiny.ipynb")
    monkeypatch.setattr(paths, "home", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Papermill:
    """Stands for the process: it ended at once, with code 7."""

    pid, seen = 0, None

    def __init__(self, command, **_):
        type(self).seen = command

    def wait(self, seconds):
        return 7


def test_run_starts_papermill_and_passes_its_exit_code_on(capsys, chapter, monkeypatch):
    monkeypatch.setattr(cli.run.subprocess, "Popen", Papermill)
    (chapter / "mine.yaml").write_text("depth: 5")
    code, out, _ = run(capsys, "run", "7", "-p", "depth", "6", "-r", "overrides", "steps=5", "-f", "mine.yaml")
    assert code == 7
    seen = Papermill.seen
    assert seen[:3] == [sys.executable, "-m", "nanolearn.cli.headless"]
    assert seen[-8:] == ["-f", str(chapter / "mine.yaml"), "-p", "depth", "6", "-r", "overrides", "steps=5"]
    assert str(chapter / "notebooks" / "07_tiny.ipynb") in seen
    assert out.strip().endswith("out/07_tiny.ipynb")
    assert run(capsys, "run", "7", "-f", "no.yaml")[0] == 2


@pytest.mark.parametrize(
    "text, said",
    [("dept: 5", "did you mean 'depth'"), ("- 5", "gives no parameters"), ("a: [", "is no YAML"), ("", "gives no")],
)
def test_a_parameter_file_that_is_none_never_reaches_papermill(capsys, chapter, monkeypatch, text, said):
    monkeypatch.setattr(cli.run.subprocess, "Popen", lambda *_, **__: pytest.fail("papermill was started"))
    (chapter / "mine.yaml").write_text(text)
    code, _, err = run(capsys, "run", "7", "-f", "mine.yaml")
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_a_place_that_can_hold_no_notebook_is_refused(capsys, chapter):
    (chapter / "file").write_text("")
    for out in ("file/x.ipynb", str(chapter)):
        code, _, err = run(capsys, "run", "7", "--out", out)
        assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("arguments", [["fetch", "embedded", "--shards", "-1"], ["show", "--documents", "0"]])
def test_counts_below_1_are_refused(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        run(capsys, "data", *arguments)
    assert ended.value.code == 2
    assert "no whole number of 1 or more" in capsys.readouterr().err


def test_n1_an_unknown_parameter_never_reaches_papermill(capsys, chapter, monkeypatch):
    monkeypatch.setattr(cli.run.subprocess, "Popen", lambda *_, **__: pytest.fail("papermill was started"))
    for names in (("-p", "dept", "24"), ("-p", "depth", "24", "-r", "dept", "24")):
        code, _, err = run(capsys, "run", "07", *names)
        assert code == 2
        assert "did you mean 'depth'" in err


@pytest.mark.slow
def test_run_executes_a_notebook(capsys, chapter):
    assert run(capsys, "run", "07_tiny", "-p", "depth", "6", "--out", "made/here.ipynb")[0] == 0
    made = nbformat.read(chapter / "made" / "here.ipynb", as_version=4)
    assert "depth 6" in str(made.cells[-2].outputs)
    assert run(capsys, "run", "07", "-p", "depth", "3")[0] == 1
    code, out, _ = run(capsys, "run", "07", "-p", "depth", "2")
    assert (code, out.strip().splitlines()[-1]) == (2, "2 is few: give 4")
