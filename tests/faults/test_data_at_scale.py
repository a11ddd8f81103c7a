"""A run over a Hub data set that is fetched, tokenised in the background, dropped for want of room, and resumed."""

import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanolearn.data.ahead import Team
from nanolearn.data.sources import open_source, texts
from nanolearn.data.tokens import TokenStore
from nanolearn.fetch import locked
from nanolearn.paths import cache_dir
from nanolearn.tokenizer import train as train_tokenizer
from nanolearn.train.records import read
from tests.local_server import COMMIT, Hub, serving
from tests.ranks import run_ranks
from tests.train.conftest import WORDS, Tiny, losses, rows

pytestmark = pytest.mark.slow

REPO = "someone/corpus"
SHARDS = 6  # and one for validation
STEPS = 40  # almost two passes
SCRIPT = Path(__file__).with_name("scale_script.py")


def parquet(folder: Path, number: int, documents: int = 25) -> bytes:
    random = np.random.default_rng(number)
    rows = [" ".join(random.choice(WORDS, random.integers(5, 40))) + "." for _ in range(documents)]
    pq.write_table(pa.table({"text": rows}), folder / "one.parquet")
    return (folder / "one.parquet").read_bytes()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr("nanolearn.fetch.PAUSE", 0.001)
    monkeypatch.setattr("nanolearn.data.ahead.AGAIN", 0.2)
    with serving(Hub()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.datasets[REPO] = {
            f"data/shard_{number:05d}.parquet": parquet(tmp_path, number) for number in range(SHARDS + 1)
        }
        yield server


@pytest.fixture
def scale(hub, tmp_path, monkeypatch) -> Tiny:
    """The tiny run over that data set."""
    monkeypatch.setattr("nanolearn.train.judge.SAMPLE_TOKENS", 3)
    source = open_source(f"hf:{REPO}/data")
    return Tiny(Path(f"hf:{REPO}/data"), source, train_tokenizer(texts(source), 300))


@contextmanager
def cache(path: Path, monkeypatch):
    """Another cache, as on another machine."""
    with monkeypatch.context() as patch:
        patch.setenv("NANOLEARN_CACHE", str(path))
        yield


def recipe(scale: Tiny):
    return scale.recipe(steps=STEPS, data=f"hf:{REPO}/data")


def undisturbed(scale: Tiny, folder: Path) -> list[float]:
    """The losses where everything was prepared."""
    for split in ("train", "val"):
        TokenStore(scale.source, scale.tokenizer, split).prepare()
    scale.train(folder, recipe(scale))
    return losses(folder)


def train(scale: Tiny, folder: Path, stop_at: int = -1, **fields):
    """Train with a source that knows nothing yet; a signal comes after step `stop_at`."""

    def stop(record: dict) -> None:
        if record["kind"] == "step" and record["step"] == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    fresh = Tiny(scale.corpus, open_source(f"hf:{REPO}/data"), scale.tokenizer)
    return fresh.train(folder, recipe(scale), observers=(stop,), **fields)


def fetched(hub: Hub) -> list[int]:
    return [hub.count(f"/datasets/{REPO}/resolve/{COMMIT}/data/shard_{n:05d}.parquet") for n in range(SHARDS + 1)]


def taken() -> int:
    """Bytes of the cached corpus: text and tokens."""
    return sum(
        path.stat().st_size
        for pattern in ("hub/*/*/data/*.parquet", "tokens/*/*.arrow")
        for path in cache_dir().glob(pattern)
    )


def test_nothing_is_prepared_and_the_losses_are_those_of_a_prepared_run(scale, hub, tmp_path, monkeypatch):
    expected = undisturbed(scale, tmp_path / "quiet")
    before, apart = fetched(hub), []
    run = Team._run
    monkeypatch.setattr(Team, "_run", lambda team, job: (run(team, job), apart.append(job.path)))
    with cache(tmp_path / "cache", monkeypatch):
        train(scale, tmp_path / "run")
    assert losses(tmp_path / "run") == expected
    assert rows(tmp_path / "run") == [8 * step for step in range(STEPS)]
    assert [now - then for now, then in zip(fetched(hub), before, strict=True)] == [1] * (SHARDS + 1)
    assert read(tmp_path / "run", "step")[-1]["epoch"] == 1, "the second pass read what the first one made"
    assert apart, "no shard was made by a background process"


def test_shards_are_dropped_fetched_again_and_the_run_is_interrupted(scale, hub, tmp_path, monkeypatch, capsys):
    """disk_gb has room for half of the shards; the server fails now and then; three interrupts."""
    expected = undisturbed(scale, tmp_path / "quiet")
    bound = taken() * 0.6
    each = taken() / (SHARDS + 1)
    before = fetched(hub)
    for number in range(SHARDS):
        path = f"/datasets/{REPO}/resolve/{COMMIT}/data/shard_{number:05d}.parquet"
        hub.faults[path] = ["cut", 500, "wrong", 503]
    with cache(tmp_path / "cache", monkeypatch):
        for stop_at in (7, 18, 29, -1):
            train(scale, tmp_path / "run", stop_at, disk_gb=bound / 1e9)
            assert taken() < bound + 2 * each, "more than the shards that were being made"
    assert losses(tmp_path / "run") == expected
    assert rows(tmp_path / "run") == [8 * step for step in range(STEPS)]
    again = [now - then - 4 for now, then in zip(fetched(hub)[:SHARDS], before[:SHARDS], strict=True)]
    assert sum(again) > SHARDS, "none was dropped"
    assert fetched(hub)[SHARDS] - before[SHARDS] == 1, "validation was dropped"
    assert "is dropped, and others will be" in capsys.readouterr().out


def test_a_resume_in_the_second_pass_fetches_only_what_its_rows_need(scale, hub, tmp_path, monkeypatch):
    expected = undisturbed(scale, tmp_path / "quiet")
    train(scale, tmp_path / "run", stop_at=30)
    for path in [*cache_dir().glob("hub/*/*/data/*.parquet"), *cache_dir().glob("tokens/*/shard*.arrow")]:
        path.unlink()  # as on a machine whose disk was cleared but for the counts
    before = fetched(hub)
    train(scale, tmp_path / "run")
    assert losses(tmp_path / "run") == expected
    needed = [now - then for now, then in zip(fetched(hub), before, strict=True)]
    assert 0 in needed[:SHARDS], "a shard was fetched for its count"


def test_a_shard_in_the_making_elsewhere_is_waited_for_and_shows_as_stall(scale, tmp_path, capsys):
    """Another process holds a shard for a second: the run waits, says so once, and learns the same."""

    store = TokenStore(scale.source, scale.tokenizer, "train")
    order = np.random.default_rng(0).permutation(SHARDS)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(store.path(int(order[0]))):
            held.set()
            release.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    threading.Timer(3, release.set).start()
    train(scale, tmp_path / "run")
    holder.join()
    assert capsys.readouterr().out.count("waiting for shard") == 1
    assert max(record["stall"] for record in read(tmp_path / "run", "step")) > 0.5


def test_two_ranks_share_one_team_and_one_bound(scale, hub, tmp_path, monkeypatch):
    """Each shard is made once while it lasts, whichever rank needs it first; the losses are those of one rank."""
    expected = undisturbed(scale, tmp_path / "quiet")
    bound = taken() * 0.6
    recipe(scale).save(tmp_path / "recipe")
    scale.execution(micro_batch=2, disk_gb=bound / 1e9).save(tmp_path / "execution")
    scale.tokenizer.save(tmp_path / "tokenizer")
    before = sum(fetched(hub))
    run_ranks(SCRIPT, 2, str(tmp_path), NANOLEARN_CACHE=str(tmp_path / "cache"), LOCAL_WORLD_SIZE="2")
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-3)
    assert rows(tmp_path / "run") == [8 * step for step in range(STEPS)]
    assert SHARDS + 1 < sum(fetched(hub)) - before < 4 * (SHARDS + 1)
