"""Where things lie can be chosen, and never depends on the folder a notebook was started in."""

from pathlib import Path

from nanolearn import paths


def test_environment_variables_win(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOLEARN_CACHE", str(tmp_path / "c"))
    monkeypatch.setenv("NANOLEARN_RUNS", str(tmp_path / "r"))
    assert paths.cache_dir() == tmp_path / "c"
    assert paths.runs_dir() == tmp_path / "r"


def test_without_them_runs_lie_in_the_checkout_and_downloads_in_the_users_cache(monkeypatch, tmp_path):
    for name in ("NANOLEARN_CACHE", "NANOLEARN_RUNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert paths.cache_dir() == tmp_path / "nanolearn"
    assert paths.runs_dir() == Path(__file__).resolve().parent.parent / "runs"


def test_an_installed_copy_uses_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "site-packages" / "nanolearn" / "paths.py"))
    monkeypatch.chdir(tmp_path)
    assert paths.home() == tmp_path
