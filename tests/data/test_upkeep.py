"""A corpus is fetched beforehand, side by side, and looked over for damage; `nanolearn data` says so."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanolearn.cli import main
from nanolearn.data.listing import arrived
from nanolearn.data.sources import open_source
from nanolearn.data.tokens import TokenStore
from nanolearn.data.upkeep import SIDE_BY_SIDE, fetch_all, parts, to_fetch
from nanolearn.errors import UserError
from nanolearn.paths import cache_dir
from nanolearn.tokenizer import Tokenizer
from tests.local_server import COMMIT, Hub, serving

REPO = "someone/corpus"
SPEC = f"hf:{REPO}/data"


def texts(number: int) -> list[str]:
    return [f"document {i} of shard {number} " * 30 for i in range(40)]


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setattr("nanolearn.fetch.PAUSE", 0.001)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100)
    with serving(Hub()) as answers:
        monkeypatch.setenv("HF_ENDPOINT", answers.url)
        answers.datasets[REPO] = {}
        for number in range(7):
            pq.write_table(pa.table({"text": texts(number)}), tmp_path / "x.parquet")
            answers.datasets[REPO][f"data/shard_{number:05d}.parquet"] = (tmp_path / "x.parquet").read_bytes()
        yield answers


def served(number: int) -> str:
    return f"/datasets/{REPO}/resolve/{COMMIT}/data/shard_{number:05d}.parquet"


def run(capsys, *command: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(command)
    out, error = capsys.readouterr()
    return code, out, error


def test_shards_are_fetched_side_by_side_and_counted(server):
    source = open_source(SPEC)
    names = source.shards("train")
    for number in range(6):
        server.faults[served(number)] = ["crawl"]
    told = []
    fetch_all(source, names, lambda size, count: told.append((size, count)))
    assert told == sorted(told)
    assert told[-1] == (sum(to_fetch(source, names).values()), 6)
    assert [server.count(served(number)) for number in range(7)] == [1] * 6 + [0]
    assert 1 < SIDE_BY_SIDE < 6


def test_one_shard_that_fails_ends_the_rest_and_is_named(server, capsys, monkeypatch):
    monkeypatch.setattr("nanolearn.data.listing.FILE_TRIES", 2)
    server.faults[served(2)] = [500] * 100
    code, _, error = run(capsys, "data", "fetch", SPEC)
    assert code == 2
    assert "data/shard_00002.parquet of someone/corpus could not be fetched" in error
    server.faults.clear()
    code, out, _ = run(capsys, "data", "fetch", SPEC)
    assert code == 0
    assert out.count(".parquet") == 7
    assert "7 of 7 files" in out, "a log hears how far it is"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_fetch_goes_on_where_it_stopped(server, number, root):
    for shard in range(7):
        server.datasets[REPO][f"data/shard_{shard:05d}.parquet"] += bytes(60_000)  # no Parquet file, but large
        server.faults[served(shard)] = ["crawl"]
    code = "import sys; from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 1000; "
    code += "from nanolearn.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "data", "fetch", SPEC]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        parts_of = cache_dir() / "hub"
        for _ in range(4000):
            if sum(path.stat().st_size for path in parts_of.rglob("*.part")) > 60_000:
                break
            time.sleep(0.05)
        process.send_signal(number)
        _, error = process.communicate(timeout=90)
    assert process.returncode == (130 if number == signal.SIGINT else -9)
    assert ("the same command goes on from it" in error) == (number == signal.SIGINT)
    source = open_source(SPEC)
    names = [*source.shards("val"), *source.shards("train")]
    have = sum(map(arrived, to_fetch(source, names)))
    assert 50_000 < have < sum(to_fetch(source, names).values())
    before = len(server.requests)
    for name in names:
        assert source.fetch(name).read_bytes() == server.datasets[REPO][f"data/{name}.parquet"]
    assert sum(asked is not None for _, _, asked in server.requests[before:]) >= 2


@pytest.fixture
def tokenizer():
    return Tokenizer([bytes([i]) for i in range(256)])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damage_is_found_named_and_mended(server, capsys, tokenizer):
    source = open_source(SPEC)
    store = TokenStore(source, tokenizer, "train")
    for index in range(3):
        store.shard(index)
    text, tokens = source.path("shard_00001"), store.path(2)
    whole = {path: path.read_bytes() for path in (text, tokens)}
    code, out, _ = run(capsys, "data", "verify", SPEC)
    assert (code, out) == (0, f"{SPEC}: 6 files here, {sum_of(SPEC) / 1e9:.3g} GB, 0 damaged\n")
    flip(text)
    tokens.write_bytes(tokens.read_bytes()[:-40])
    code, out, error = run(capsys, "data", "verify", SPEC)
    assert code == 1
    assert f"damaged: {text} (its SHA-256 is not the one that the Hub states)" in out
    assert f"damaged: {tokens} (" in out
    assert "2 damaged" in out
    assert "--repair" in error
    code, out, _ = run(capsys, "data", "verify", SPEC, "--repair")
    assert code == 0
    assert out.count("made anew") == 2
    assert {path: path.read_bytes() for path in whole} == whole
    assert run(capsys, "data", "verify", SPEC)[0] == 0


def sum_of(spec: str) -> int:
    return sum(part.path.stat().st_size for part in parts(spec))


def test_a_corpus_of_ones_own_is_written_anew_and_its_files_are_left_alone(tmp_path, capsys, tokenizer):
    folder = tmp_path / "mine"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(map(str, random.integers(0, 10**9, 200))))
    source = open_source(str(folder))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    TokenStore(source, tokenizer, "train").prepare()
    shard = source.path(source.shards("train")[0])
    whole = shard.read_bytes()
    flip(shard)
    code, out, _ = run(capsys, "data", "verify", str(folder))
    assert (code, out.count("damaged: ")) == (1, 1)
    assert run(capsys, "data", "verify", str(folder), "--repair")[0] == 0
    assert shard.read_bytes() == whole
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_tokens_are_made_for_the_wanted_shards_only(server, capsys):
    code, out, _ = run(capsys, "data", "tokens", SPEC, "--shards", "2", "--vocab-size", "280")
    assert code == 0
    assert "80 documents" in out
    # The tokenizer is that of the corpus, whatever was asked for: its sample of 2 GB is all of this one.
    assert [server.count(served(number)) for number in range(7)] == [1] * 7


def test_a_repair_that_cannot_be_done_is_an_error(server, capsys, monkeypatch):
    monkeypatch.setattr("nanolearn.data.listing.FILE_TRIES", 1)
    flip(open_source(SPEC).path("shard_00001"))
    server.faults[served(1)] = [500] * 10
    code, _, error = run(capsys, "data", "verify", SPEC, "--repair")
    assert (code, "could not be fetched" in error) == (2, True)
    with pytest.raises(UserError):
        open_source(SPEC).path("shard_00001")
