"""Published vocabularies: the sizes and ids that their makers state, and nobody's settings changed."""

import os

import pytest

from nanolearn.published import NAMES, published


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, size, ids",
    [
        # OpenAI's tokenizer page and tiktoken's README: "hello world" by encoding.
        ("gpt2", 50257, [31373, 995]),
        ("cl100k", 100277, [15339, 1917]),
        ("o200k", 200019, [24912, 2375]),
    ],
)
def test_it_is_the_published_one(name, size, ids, embedded_corpus, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "mine")
    encoding = published(name)
    assert encoding.n_vocab == size
    assert encoding.encode("hello world") == ids
    assert os.environ["TIKTOKEN_CACHE_DIR"] == "mine"


@pytest.mark.slow
def test_a_damaged_file_is_never_used(embedded_corpus, tmp_path, monkeypatch):
    """tiktoken compares the hash, and asks its own server next, which nobody reaches here."""
    import tiktoken.registry

    monkeypatch.setenv("NANOLEARN_CACHE", str(tmp_path))
    file = tmp_path / "tiktoken" / NAMES["gpt2"][3]
    file.parent.mkdir()
    file.write_bytes(b"IQ== 0\n")
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr("tiktoken.load.read_file", lambda _: b"also damaged")
    with pytest.raises(ValueError, match="Hash mismatch"):
        published("gpt2")
