"""Hub data sets against a server on this machine that gives the Hub's answers, right and wrong ones."""

import hashlib
import io
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanolearn.data import hub
from nanolearn.data.hub import DataSet, HubSource
from nanolearn.data.listing import arrived, fetch_shard, listing, stored
from nanolearn.data.sources import open_source, read_texts, texts
from nanolearn.data.split import held_out
from nanolearn.errors import UserError
from nanolearn.paths import cache_dir
from tests.local_server import COMMIT, Files, Hub, serving

REPO = "someone/corpus"
REVISION = f"/api/datasets/{REPO}/revision/main"


def parquet(rows: list[str | None], column: str = "text", **more: list) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({column: rows, **more}), sink)
    return sink.getvalue()


def shard(number: int) -> list[str]:
    return [f"document {i} of shard {number}" for i in range(20)]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the pauses between tries, huggingface_hub's among them
    # huggingface_hub writes in pieces of 10 MB, and loses the last, broken one: our files are smaller.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1)
    with serving(Hub()) as answers:
        monkeypatch.setenv("HF_ENDPOINT", answers.url)
        files = {f"data/shard_{number:05d}.parquet": parquet(shard(number)) for number in range(4)}
        answers.datasets[REPO] = {**files, "README.md": b"# a card", "other/x.parquet": parquet(["x"] * 9)}
        yield answers


def served(server: Hub, name: str) -> str:
    return f"/datasets/{REPO}/resolve/{COMMIT}/{name}"


def read(source: HubSource, name: str) -> list[str]:
    return [text for batch in read_texts(source.path(name)) for text in batch]


def test_every_file_is_a_shard_and_the_last_one_validates(server):
    source = open_source(f"hf:{REPO}/data")
    assert source.shards("train") == ("shard_00000", "shard_00001", "shard_00002")
    assert source.shards("val") == ("shard_00003",)
    assert [read(source, name) for name in (*source.shards("train"), *source.shards("val"))] == list(
        map(shard, range(4))
    )
    assert re.fullmatch(r"someone-corpus-[0-9a-f]{8}", source.name)
    assert "validation is its last Parquet file" in source.note
    assert source.size_hint("train") is None
    assert source.download_hint is None


def test_only_the_shards_that_are_asked_for_are_fetched(server):
    source = open_source(f"hf:{REPO}/data")
    assert list(texts(source, max_bytes=30)) == shard(0)[:2]
    assert server.count(served(server, "data/shard_00000.parquet")) == 1
    assert server.count(served(server, "data/shard_00001.parquet")) == 0


def test_shards_of_nested_folders_have_flat_names(server):
    source = open_source(f"hf:{REPO}")
    assert source.shards("train") == tuple(f"data--shard_{number:05d}" for number in range(4))
    assert source.shards("val") == ("other--x",)


def test_list_and_shards_are_kept_so_that_no_network_is_needed(server, monkeypatch):
    source = open_source(f"hf:{REPO}/data")
    first = (source.name, source.shards("train"), read(source, "shard_00001"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    again = open_source(f"hf:{REPO}/data")
    assert (again.name, again.shards("train"), read(again, "shard_00001")) == first
    with pytest.raises(UserError, match=r"data/shard_00002\.parquet of someone/corpus could not be fetched"):
        again.path("shard_00002")


def test_a_commit_can_be_pinned(server):
    assert open_source(f"hf:{REPO}/data@{COMMIT}").name == open_source(f"hf:{REPO}/data").name
    with pytest.raises(UserError, match="no such revision"):
        open_source(f"hf:{REPO}/data@v9").shards("train")


def test_d7_missing_validation_shard_is_an_error(server, monkeypatch):
    """Never a training shard in its place, neither when it is not listed nor when it is gone."""
    pinned = DataSet("corpus", REPO, "data", validation="shard_00007.parquet")
    monkeypatch.setitem(hub.KNOWN, "pinned", pinned)
    source = open_source("pinned")
    for ask in (lambda: source.shards("val"), lambda: source.shards("train"), lambda: source.name):
        with pytest.raises(UserError, match=r"validation shard shard_00007\.parquet is missing from someone/corpus"):
            ask()
    server.missing.add("data/shard_00003.parquet")
    listed = open_source(f"hf:{REPO}/data")
    (name,) = listed.shards("val")
    with pytest.raises(UserError, match=r"data/shard_00003\.parquet of someone/corpus has no such"):
        listed.path(name)
    assert server.count(served(server, "data/shard_00003.parquet")) == 1


def test_a_pinned_validation_shard_is_not_trained_on(server, monkeypatch):
    monkeypatch.setitem(hub.KNOWN, "pinned", DataSet("corpus", REPO, "data", validation="shard_00001.parquet"))
    source = open_source("pinned")
    assert source.shards("val") == ("shard_00001",)
    assert source.shards("train") == ("shard_00000", "shard_00002", "shard_00003")
    assert "validation is the pinned shard_00001.parquet" in source.note


def test_d1_a_data_set_of_one_file_trains(server):
    """Its only shard is not given to validation whole; it is split by row, and that is said."""
    rows = [f"text number {i}" for i in range(300)]
    server.datasets[REPO] = {"train.parquet": parquet([None, *rows])}
    source = open_source(f"hf:{REPO}")
    found = {split: [read(source, name) for name in source.shards(split)] for split in ("train", "val")}
    assert sorted(found["train"][0] + found["val"][0]) == sorted(rows)
    held = {text for row, text in enumerate(rows, start=1) if held_out(f"{REPO}/{row}")}
    assert set(found["val"][0]) == held
    assert 5 < len(held) < 30
    assert "or 1 document in 20 by its hash if it has only one" in source.note


def test_a_text_column_of_another_name(server):
    for number in range(2):
        name = f"data/shard_{number:05d}.parquet"
        server.datasets[REPO][name] = parquet([*shard(number), None], "story", title=["t"] * 21)
    source = open_source(f"hf:{REPO}/data::story")
    assert read(source, "shard_00000") == shard(0)
    assert read(source, "shard_00000") == shard(0)
    assert server.count(served(server, "data/shard_00000.parquet")) == 1
    with pytest.raises(UserError, match="2 columns of strings.*it has story, title"):
        open_source(f"hf:{REPO}/data").path("shard_00001")


def test_d8_a_shard_that_ends_early_is_fetched_whole(server):
    path = served(server, "data/shard_00000.parquet")
    server.faults[path] = ["cut", "cut", 500, "wrong"]
    source = open_source(f"hf:{REPO}/data")
    assert read(source, "shard_00000") == shard(0)
    assert server.count(path) >= 4


def test_d8_wrong_bytes_are_never_accepted(server):
    """huggingface_hub compares the size; right size and wrong bytes are told by the SHA-256."""
    path = served(server, "data/shard_00000.parquet")
    server.faults[path] = ["wrong"] * 20
    source = open_source(f"hf:{REPO}/data")
    with pytest.raises(UserError, match="SHA-256 is not the one that the Hub states") as caught:
        source.path("shard_00000")
    assert "\n" not in str(caught.value)
    assert not list(cache_dir().rglob("shard_00000.parquet"))


def test_d8_a_server_that_answers_500(server):
    server.faults[REVISION] = [500]
    assert len(open_source(f"hf:{REPO}/data").shards("train")) == 3
    server.faults[served(server, "data/shard_00000.parquet")] = [500] * 200
    with pytest.raises(UserError, match="could not be fetched .*500.*check the network") as caught:
        open_source(f"hf:{REPO}/data").path("shard_00000")
    assert "\n" not in str(caught.value)


def test_d8_a_server_that_answers_500_for_a_while(server):
    server.faults[served(server, "data/shard_00000.parquet")] = [500, 503, 429, 500]
    assert read(open_source(f"hf:{REPO}/data"), "shard_00000") == shard(0)


@pytest.mark.parametrize("fault", ["cut", "short", "wrong", "hang", 500])
def test_d8_a_fault_that_stays_ends_in_one_line_that_says_how_to_go_on(server, monkeypatch, fault):
    """Named: the shard, the data set, what the server did, and what to do; and nothing is taken for the file."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr("nanolearn.data.listing.FILE_TRIES", 2)
    server.faults[served(server, "data/shard_00001.parquet")] = [fault] * 400
    expected = r"data/shard_00001\.parquet of someone/corpus could not be fetched \((.+)\): .*repeat the command"
    with pytest.raises(UserError, match=expected) as caught:
        open_source(f"hf:{REPO}/data").path("shard_00001")
    assert "\n" not in str(caught.value)
    said = {"short": "should be of size", "wrong": "SHA-256", 500: "500", "cut": "peer closed", "hang": "timed out"}
    assert re.search(said[fault], str(caught.value))
    assert not list(cache_dir().rglob("shard_00001.parquet"))


def test_d8_a_range_that_the_server_ignores_gives_the_file_once(server):
    path = served(server, "data/shard_00000.parquet")
    server.faults[path] = ["cut", "all"]
    source = open_source(f"hf:{REPO}/data")
    assert read(source, "shard_00000") == shard(0)
    assert server.requests[-1][2] is not None, "the rest was asked for"


def test_d8_a_part_that_is_longer_than_the_file_or_not_its_beginning(server):
    found = listing(REPO, "data")
    content = server.datasets[REPO]["data/shard_00000.parquet"]
    part = stored(found, found.files[0])
    part.parent.mkdir(parents=True)
    for before in (content + b"more", b"other" + content[5:100], content[:-1] + b"?", content):
        part.with_name(f"{part.name}.part").write_bytes(before)
        assert fetch_shard(found, found.files[0]).read_bytes() == content
        assert [path.name for path in part.parent.iterdir() if path.suffix != ".lock"] == [part.name]
        part.unlink()


def test_d8_redirects_are_followed_and_the_token_stays_with_the_hub(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    path = served(server, "data/shard_00000.parquet")
    with serving(Files()) as store:
        store.contents[path] = server.datasets[REPO]["data/shard_00000.parquet"]
        store.faults[path] = ["cut", "cut"]
        open_source(f"hf:{REPO}/data").shards("train")
        server.elsewhere = store.url
        assert read(open_source(f"hf:{REPO}/data"), "shard_00000") == shard(0)
        assert store.count(path) == 3
        assert not [headers for headers in store.headers if "Authorization" in headers or "authorization" in headers]
    assert any("secret" in str(headers) for headers in server.headers)


FETCH = "import sys; from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 1000\n"
FETCH += "from nanolearn.data.sources import open_source; print(open_source(sys.argv[1]).path(sys.argv[2]))"


def fetching(name: str) -> subprocess.Popen:
    command = [sys.executable, "-c", FETCH, f"hf:{REPO}/data", name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_d8_two_processes_fetch_one_shard_once(server):
    path = served(server, "data/shard_00000.parquet")
    server.faults[path] = ["crawl"]
    both = [fetching("shard_00000") for _ in range(2)]
    answers = {process.communicate(timeout=60)[0] for process in both}
    assert len(answers) == 1
    assert Path(answers.pop().strip()).read_bytes() == server.datasets[REPO]["data/shard_00000.parquet"]
    assert server.count(path) == 1


@pytest.mark.slow
def test_d8_what_a_killed_process_fetched_is_kept_and_the_rest_asked_for(server):
    content = np.random.default_rng(0).integers(0, 256, 1 << 18, dtype=np.uint8).tobytes()
    server.datasets[REPO]["data/shard_00000.parquet"] = content
    path = served(server, "data/shard_00000.parquet")
    server.faults[path] = ["crawl"]
    open_source(f"hf:{REPO}/data").shards("train")
    found = listing(REPO, "data")
    place = stored(found, found.files[0])
    process, deadline = fetching("shard_00000"), threading.Event()
    for _ in range(1000):
        if arrived(place) > len(content) // 2:
            break
        deadline.wait(0.05)
    process.kill()
    process.wait()
    process.stdout.close()
    assert 0 < arrived(place) < len(content)
    assert not place.exists()
    have = arrived(place)
    assert fetch_shard(found, found.files[0]).read_bytes() == content
    assert server.requests[-1][2] == f"bytes={have}-"


def test_an_unreachable_hub_is_one_line_soon(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    source = open_source("climbmix")
    assert source.tokens_per_shard_hint == 61_000_000, "a plan needs no network"
    assert 350e9 < source.tokens_per_shard_hint * 6542 < 450e9
    with pytest.raises(
        UserError, match=r"climbmix-400b-shuffle on the Hugging Face Hub could not be fetched"
    ) as caught:
        source.shards("train")
    assert re.search(r"check the network .*data=embedded or a folder of your own$", str(caught.value))


def test_offline_mode_is_respected(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        open_source(f"hf:{REPO}/data").shards("train")


def test_a_name_that_the_hub_does_not_know(server):
    with pytest.raises(UserError, match="no-one/nothing on the Hugging Face Hub does not exist or is private"):
        open_source("hf:no-one/nothing").shards("train")
    with pytest.raises(UserError, match="no such revision, folder or file"):
        open_source(f"hf:{REPO}/nowhere").shards("train")
    server.datasets["someone/csv"] = {"a.csv": b"x"}
    with pytest.raises(UserError, match="holds no Parquet file: try hf:someone/csv@refs/convert/parquet"):
        open_source("hf:someone/csv").shards("train")


def test_the_listing_is_fixed_by_name_and_commit(server):
    found = listing(REPO, "data")
    assert found.revision == COMMIT
    assert [file.path for file in found.files] == sorted(file.path for file in found.files)
    content = server.datasets[REPO]["data/shard_00002.parquet"]
    assert (found.files[2].size, found.files[2].sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert fetch_shard(found, found.files[2]).read_bytes() == content


def test_d7_the_shard_that_was_first_held_out_stays_held_out(server):
    """Another list (another revision, the cache's list removed) makes no training shard of it, nor of
    a training shard the validation.
    """
    first = open_source(f"hf:{REPO}/data")
    assert first.shards("val") == ("shard_00003",)
    server.datasets[REPO]["data/shard_00009.parquet"] = parquet(shard(9))
    for kept in (cache_dir() / "hub").glob("*.json"):
        kept.unlink()
    longer = open_source(f"hf:{REPO}/data")
    assert longer.shards("val") == ("shard_00003",)
    assert "shard_00009" in longer.shards("train")
    del server.datasets[REPO]["data/shard_00003.parquet"]
    for kept in (cache_dir() / "hub").glob("*.json"):
        kept.unlink()
    without = open_source(f"hf:{REPO}/data")
    for ask in (lambda: without.shards("val"), lambda: without.shards("train"), lambda: without.name):
        with pytest.raises(UserError, match=r"shard_00003\.parquet is missing .*remove .*\.validation to choose anew"):
            ask()


def test_d7_known_data_sets_pin_their_validation_by_name():
    for name, data_set in hub.KNOWN.items():
        assert data_set.validation, name
        assert f"validation is the pinned {data_set.validation}" in open_source(name).note
