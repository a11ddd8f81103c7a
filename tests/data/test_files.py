"""A person's own files: each format, each way in which they can be wrong, and nothing on disk lost."""

import errno
import json
import multiprocessing
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanolearn.data import corpus as corpus_module
from nanolearn.data import files as files_module
from nanolearn.data.corpus import MANIFEST, Corpus, Document, count_shards
from nanolearn.data.files import own_files, text_column
from nanolearn.data.sources import read_texts
from nanolearn.data.split import RULE, held_out
from nanolearn.errors import UserError
from nanolearn.paths import cache_dir
from nanolearn.tokenizer import clean


def everything(source: Corpus) -> dict[str, list[str]]:
    return {
        split: [text for shard in source.shards(split) for batch in read_texts(source.path(shard)) for text in batch]
        for split in ("train", "val")
    }


def both_sides(source: Corpus) -> list[str]:
    return sorted(sum(everything(source).values(), []))


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


TEXTS = [f"document number {i} with a few words" for i in range(100)]


def test_a_folder_of_all_three_formats(tmp_path):
    (tmp_path / "one.txt").write_text(TEXTS[0])
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "TWO.TXT").write_text(TEXTS[1])
    jsonl(tmp_path / "three.jsonl", [{"text": text} for text in TEXTS[2:50]])
    parquet(tmp_path / "four.parquet", text=TEXTS[50:])
    (tmp_path / "notes.doc").write_text("left out")
    (tmp_path / ".hidden.txt").write_text("left out, too")
    source = own_files(tmp_path)
    assert both_sides(source) == sorted(TEXTS)
    assert "4 files of" in source.note
    assert "text column 'text', guessed" in source.note
    assert "1 of other kinds left out" in source.note
    assert RULE in source.note


def test_d1_a_single_file_gives_training_and_validation_text(tmp_path):
    """One shard, even one document, leaves neither side empty."""
    path = tmp_path / "input.txt"
    text = "".join(f"line {i} of a play\n" for i in range(2000))
    path.write_text(text)
    source = own_files(path)
    found = everything(source)
    assert "".join(found["train"] + found["val"]) == text
    assert 0.04 < len(found["val"][0]) / len(text) <= 0.05
    assert source.note.endswith("validation is the last 5% of the only document")
    assert (source.shards("train"), source.shards("val")) == (("train_00000",), ("val_00000",))


def test_the_split_follows_the_text_not_the_file(tmp_path):
    copies = [*TEXTS, TEXTS[3], TEXTS[3]]
    first = everything(own_files(jsonl(tmp_path / "a.jsonl", [{"text": text} for text in copies])))
    second = everything(own_files(parquet(tmp_path / "b.parquet", story=TEXTS[::-1])))
    assert {side: set(texts) for side, texts in first.items()} == {side: set(texts) for side, texts in second.items()}
    assert not set(first["train"]) & set(first["val"])


def test_a_corpus_is_known_by_its_content(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    before = own_files(path)
    manifest = before.manifest
    assert own_files(path).name == before.name
    assert own_files(path).digest == before.digest
    jsonl(path, [{"text": text} for text in [*TEXTS, "one more"]])
    after = own_files(path)
    assert after.name != before.name
    assert len(both_sides(after)) == 101
    assert manifest == before.manifest, "the earlier corpus is still there"


def test_a_large_corpus_is_known_by_names_sizes_and_times(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "CONTENT_UP_TO", 10)
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    before = own_files(path).digest
    assert own_files(path).digest == before
    path.touch()
    assert own_files(path).digest != before


def test_written_once_and_hints_become_exact(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    source = own_files(path)
    guess = source.size_hint("train")
    found = everything(source)
    assert source.size_hint("train") == sum(len(text.encode()) for text in found["train"])
    assert source.size_hint("val") == sum(len(text.encode()) for text in found["val"])
    assert guess == pytest.approx(source.size_hint("train"), rel=0.5)
    assert source.tokens_per_shard_hint > 0
    written = (source.folder / MANIFEST).stat().st_mtime_ns
    assert everything(own_files(path)) == found
    assert (source.folder / MANIFEST).stat().st_mtime_ns == written
    with pytest.raises(KeyError):
        source.path("train_00099")


def test_documents_lie_in_hash_order_so_a_prefix_looks_like_the_whole():
    def documents(tally):
        for i in range(4000):
            yield Document(f"long/{i}", f"long/{i}", f"L {i} " * 300)
        for i in range(4000):
            yield Document(f"short/{i}", f"short/{i}", f"S {i} ")

    source = Corpus("mixed", "1", "a mixture", 9 << 20, documents)
    assert len(source.shards("train")) == count_shards(9 << 20) == 2
    texts = everything(source)
    for shard in source.shards("train"):
        kinds = [text[0] for batch in read_texts(source.path(shard)) for text in batch][:1000]
        assert 400 < kinds.count("L") < 600, "six standard deviations of a fair coin"
    assert sum(map(len, texts.values())) == 8000
    assert {text for text in texts["val"] if text[0] == "S"} == {
        f"S {i} " for i in range(4000) if held_out(f"short/{i}")
    }


@given(st.lists(st.text(max_size=30), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_any_strings_survive_or_are_counted(tmp_path, texts):
    path = jsonl(tmp_path / "any.jsonl", [{"text": text} for text in texts])
    source = own_files(path)
    kept = [clean(text) for text in texts if text.strip()]
    if not kept:
        with pytest.raises(UserError, match="no text in it"):
            source.shards("train")
        return
    if len(set(kept)) == 1:
        return  # cut in two, or too short for that: test_split
    assert both_sides(source) == sorted(kept)
    assert source.manifest.blank == len(texts) - len(kept)


def test_null_and_blank_documents_are_skipped_and_counted(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl", [{"text": None}, {"text": ""}, {"text": " \n"}, {"id": 1}, *({"text": t} for t in TEXTS)]
    )
    source = own_files(path, "text")
    assert both_sides(source) == sorted(TEXTS)
    assert source.manifest.blank == 4
    assert "4 blank documents skipped" in source.note
    table = parquet(tmp_path / "b.parquet", text=[None, "", *TEXTS])
    assert own_files(table).manifest.blank == 2
    reader = read_texts(table)
    assert ([text for batch in reader for text in batch], reader.blank) == (TEXTS, 2)


@pytest.mark.parametrize("content", ["", "  \n\n "])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_an_empty_corpus_is_one_line(tmp_path, suffix, content):
    path = tmp_path / f"empty{suffix}"
    path.write_text(content)
    with pytest.raises(UserError, match="no text in it.*give files with text") as caught:
        own_files(path).shards("train")
    assert "\n" not in str(caught.value)


def test_an_empty_parquet_file_is_one_line(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="no text in it"):
        own_files(tmp_path).shards("train")


def test_a_folder_without_text_files_says_what_is_read(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"x")
    with pytest.raises(UserError, match=r"holds no \.txt, \.jsonl or \.parquet file"):
        own_files(tmp_path)


def test_the_only_column_of_strings_is_taken_and_said(tmp_path):
    path = parquet(tmp_path / "a.parquet", id=list(range(100)), story=TEXTS)
    source = own_files(path)
    assert both_sides(source) == sorted(TEXTS)
    assert "text column 'story', guessed" in source.note


@pytest.mark.parametrize("make", [jsonl, parquet], ids=["jsonl", "parquet"])
def test_a_missing_text_column_lists_what_there_is(tmp_path, make):
    rows = {"title": ["a", "b"], "body": ["c", "d"], "id": [1, 2]}
    path = tmp_path / f"a.{make.__name__}"
    if make is parquet:
        parquet(path, **rows)
    else:
        jsonl(path, [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)])
    with pytest.raises(UserError, match="2 columns of strings.*PATH::COLUMN; it has title, body, id"):
        own_files(path)
    with pytest.raises(UserError, match="has no column 'text': it has title, body, id"):
        own_files(path, "text")
    assert both_sides(own_files(path, "body")) == ["c", "d"]


def test_a_column_that_holds_no_strings_is_refused(tmp_path):
    numbers = parquet(tmp_path / "a.parquet", text=[1, 2])
    with pytest.raises(UserError, match="has no column of strings named 'text'"):
        own_files(numbers).shards("train")
    lines = jsonl(tmp_path / "a.jsonl", [{"text": "fine"}, {"text": ["a", "b"]}])
    with pytest.raises(UserError, match="line 2: 'text' is no string but list"):
        own_files(lines).shards("train")


def test_strings_of_every_arrow_kind_are_read(tmp_path):
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
    for number, kind in enumerate(kinds):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"text": pa.array(TEXTS).cast(kind)}), path)
        assert [text for batch in read_texts(path) for text in batch] == TEXTS


def test_a_broken_line_of_json_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n{"text": "cut\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 3, is not JSON .*mend or remove the line") as caught:
        own_files(path).shards("train")
    assert "\n" not in str(caught.value)
    path.write_text('["no object"]\n')
    with pytest.raises(UserError, match="line 1, is not a JSON object"):
        own_files(path)
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UserError, match="line 1, is not JSON"):
        own_files(path)
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(UserError, match="line 1, is not JSON"):
        own_files(path)


@pytest.mark.parametrize("size", [0, 100, 900])
def test_a_damaged_parquet_file_is_named(tmp_path, size):
    path = parquet(tmp_path / "a.parquet", text=TEXTS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"a\.parquet is not a Parquet file") as caught:
        own_files(path)
    assert "\n" not in str(caught.value)


def test_a_flipped_byte_in_a_written_shard_is_told(tmp_path):
    source = own_files(jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]))
    path = source.path("train_00000")
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train_00000\.parquet is damaged"):
        list(read_texts(path))


def test_bytes_that_are_no_utf8_are_replaced_and_said(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " * 10)
    (tmp_path / "b.txt").write_text("good text " * 10)
    source = own_files(tmp_path)
    assert "caf\ufffd " * 10 in both_sides(source)
    assert "a.txt is not all UTF-8 (first at byte 3)" in source.note
    raw = pa.array([b"caf\xe9", b"good", None], pa.binary())
    bad = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": bad}), tmp_path / "c.parquet")
    assert [text for batch in read_texts(tmp_path / "c.parquet") for text in batch] == ["caf\ufffd", "good"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\n')
    assert both_sides(own_files(tmp_path)) == ["one", "two"]


def test_lone_surrogates_in_json_become_replacement_characters(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "half \\ud83d pair"}\n{"text": "whole \\ud83d\\ude42 pair"}\n')
    assert both_sides(own_files(path)) == ["half \ufffd pair", "whole 🙂 pair"]


def test_a_document_of_5_mb_on_one_line(tmp_path):
    large = "word " * 1_000_000
    source = own_files(jsonl(tmp_path / "a.jsonl", [{"text": large}, *({"text": text} for text in TEXTS)]))
    assert both_sides(source) == sorted([large, *TEXTS])


def test_a_document_above_two_gigabytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "LIMIT", 1000)
    with pytest.raises(UserError, match="a document of 5,000 bytes: cut it"):
        own_files(jsonl(tmp_path / "a.jsonl", [{"text": "x" * 5000}])).shards("train")


def test_row_groups_are_small_whatever_the_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "ROW_GROUP", 10_000)
    source = own_files(jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " + "x" * (i * 37 % 15_000)} for i in range(200)]))
    for shard in source.shards("train"):
        about = pq.read_metadata(source.path(shard))
        assert about.num_row_groups > 10
        groups = [about.row_group(g) for g in range(about.num_row_groups)]
        assert all(group.num_rows == 1 or group.total_byte_size <= 12_000 for group in groups)


def test_a_failed_write_leaves_nothing_half_and_loses_nothing(tmp_path, monkeypatch):
    kept = own_files(jsonl(tmp_path / "kept.jsonl", [{"text": text} for text in TEXTS]))
    before = everything(kept)
    source = own_files(jsonl(tmp_path / "new.jsonl", [{"text": text.upper()} for text in TEXTS]))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "sync", full)
        with pytest.raises(UserError, match="is full"):
            source.shards("train")
    folders = sorted(path.name for path in (cache_dir() / "corpora").iterdir() if path.is_dir())
    assert folders == [kept.name]
    assert everything(kept) == before
    assert len(both_sides(source)) == 100, "the next try works"


def test_a_killed_writer_leaves_no_corpus(tmp_path):
    source = own_files(jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]))
    left = source.folder.with_name(f".{source.name}.tmp")
    left.mkdir(parents=True)
    (left / "train_00000.parquet").write_bytes(b"half")
    source.folder.mkdir()
    (source.folder / "train_00000.parquet").write_bytes(b"half")
    assert both_sides(source) == sorted(TEXTS)
    assert not left.exists()


def write_and_count(path: str) -> int:
    return len(both_sides(own_files(Path(path))))


def test_two_processes_write_one_corpus(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(write_and_count, [str(path)] * 4, chunksize=1) == [100] * 4


def test_text_column_prefers_text(tmp_path):
    path = parquet(tmp_path / "a.parquet", title=["a"], text=["b"])
    assert text_column(path) == "text"
    assert text_column(path, "title") == "title"


def test_a_slug_is_fit_for_a_file_name(tmp_path):
    folder = tmp_path / "My Notes (2024)"
    folder.mkdir()
    (folder / "a.txt").write_text("some text " * 20)
    assert re.fullmatch(r"my-notes--2024-[0-9a-f]{8}", own_files(folder).name)
