"""What all tests share: none touches the user's cache or runs, and random inputs are the same everywhere."""

import os
from pathlib import Path

# Tests multiply tiny matrices: a second thread only waits for the first, and much longer when cores are busy. Set
# before torch is imported; the processes that a test starts inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from nanolearn.paths import cache_dir  # noqa: E402

REAL_CACHE = cache_dir()

# derandomize: a failure here is a failure everywhere. No deadline: machines that run this are slow at times.
hypothesis.settings.register_profile("nanolearn", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("nanolearn")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "embedded_corpus" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache and runs of a test, and of the processes it starts, lie in a folder of its own."""
    place = tmp_path_factory.mktemp("nanolearn")
    monkeypatch.setenv("NANOLEARN_CACHE", str(place / "cache"))
    monkeypatch.setenv("NANOLEARN_RUNS", str(place / "runs"))
    monkeypatch.delenv("NANOLEARN_SIMULATE", raising=False)


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def embedded_corpus(isolated, monkeypatch: pytest.MonkeyPatch):
    """The embedded corpus, in the user's own cache (fetched if it is missing); makes the test a slow one."""
    from nanolearn.data.sources import open_source

    monkeypatch.setenv("NANOLEARN_CACHE", str(REAL_CACHE))
    source = open_source("embedded")
    for split in ("train", "val"):
        for shard in source.shards(split):
            source.path(shard)
    return source
