"""Round trips on any input, one pattern from training to use, and no surprise from text that is not prose."""

import json
import re
import time
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe

from nanolearn.errors import UserError
from nanolearn.tokenizer import DESCRIPTION, PATTERN, RANKS, RUN, SPECIAL, Tokenizer, clean, segments, train

WORDS = "the cat and the hat sat on the mat in 1234 or 56 ways; that's what they'd say, ääkköset 你好 🙂!\n\n"
TEXT = [WORDS * 20, "another text about other things, with   spaces\tand\ttabs " * 30, "a" * 300 + " " * 300]
LONG = 5_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXT, 360)


def slow_merges(tokenizer: Tokenizer, text: str) -> list[int]:
    """The definition: cut by the pattern, then join the pair of lowest rank until none is left."""
    ranks = {token: rank for rank, token in enumerate(tokenizer.ranks)}
    ids = []
    for piece in pieces(text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while len(parts) > 1:
            pairs = [(ranks.get(a + b, 1 << 60), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
            rank, i = min(pairs)
            if rank == 1 << 60:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def pieces(text: str) -> list[str]:
    return regex.findall(PATTERN, text)


@given(st.text())
@example("1234")
@example("\r\n \r\n  x\u3000y\x1c")
@settings(max_examples=300)
def test_encoding_is_the_definition_of_bpe(tokenizer, text):
    assert tokenizer.encode_ordinary(text) == slow_merges(tokenizer, text)


@given(st.text())
@example("<|bos|>")
def test_any_text_survives_a_round_trip(tokenizer, text):
    ids = tokenizer.encode_ordinary(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


@given(st.binary(max_size=200))
def test_any_bytes_can_be_written_in_tokens(tokenizer, content):
    assert tokenizer.decode_bytes(list(content)) == content, "the first 256 tokens are the bytes"
    assert tokenizer.decode(np.frombuffer(content, np.uint8)) == content.decode("utf-8", errors="replace")


@given(st.lists(st.text(), max_size=150), st.sampled_from([1, 2, 3]))
@settings(max_examples=50)
def test_a_batch_is_its_texts_one_by_one(tokenizer, texts, num_threads):
    batch = tokenizer.encode_batch(texts, num_threads)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode_ordinary(text) for text in texts]
    assert all(ids.dtype == np.uint16 for ids in batch)


def test_a_large_vocabulary_needs_32_bits():
    singles = [bytes([i]) for i in range(256)]
    pairs = [bytes([i, j]) for i in range(256) for j in range(256)]
    fits = Tokenizer(singles + pairs[: (1 << 16) - 256 - len(SPECIAL)])
    assert (fits.vocab_size, fits.dtype) == (1 << 16, np.uint16)
    large = Tokenizer(singles + pairs)
    assert large.encode_batch(["\x7f\x7f"])[0].dtype == np.uint32


def test_lone_surrogates_become_replacement_characters(tokenizer):
    text = "a\ud83db\udc00\ud83d\ude42"
    assert clean(text) == "a\ufffdb\ufffd🙂"
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == clean(text)
    assert tokenizer.encode_batch([text])[0].tolist() == tokenizer.encode_ordinary(text)
    assert train([*TEXT, text], 300).vocab_size == 300


@given(st.text(st.characters(codec="utf-8")))
def test_clean_leaves_text_alone(text):
    assert clean(text) == text


def test_what_looks_like_a_special_token_is_ordinary_text_unless_asked_for(tokenizer):
    text = "".join(SPECIAL)
    assert max(tokenizer.encode_ordinary(text)) < len(tokenizer.ranks)
    assert max(tokenizer.encode_batch([text])[0]) < len(tokenizer.ranks)
    assert tokenizer.encode(text) == tokenizer.encode_ordinary(text)
    assert tokenizer.encode(text, allowed_special="all") == list(tokenizer.special.values())
    mixed = tokenizer.encode("x<|bos|><|user_end|>y", allowed_special={"<|bos|>"})
    assert mixed == [*tokenizer.encode("x"), tokenizer.bos, *tokenizer.encode("<|user_end|>y")]
    with pytest.raises(UserError, match="'<|eos|>' is not a special token"):
        tokenizer.encode("x", allowed_special={"<|eos|>"})


def test_special_tokens_lie_behind_the_ranks_and_decode_to_their_names(tokenizer):
    assert tokenizer.vocab_size == 360 == len(tokenizer.ranks) + 9
    assert list(tokenizer.special.values()) == list(range(351, 360))
    assert tokenizer.bos == 351
    assert tokenizer.decode(range(351, 360)) == "".join(SPECIAL)


def test_e4_a_token_counts_its_raw_bytes(tokenizer):
    """The token 0x80 is one byte, not the three of its replacement character."""
    sizes = tokenizer.token_bytes()
    assert sizes.dtype == np.int64
    assert sizes.shape == (tokenizer.vocab_size,)
    assert sizes[:256].tolist() == [1] * 256
    assert sizes[0x80] == 1
    assert sizes[-9:].tolist() == [0] * 9
    assert sizes[256:-9].tolist() == [len(tokenizer.decode_bytes([i])) for i in range(256, 351)]


def test_d11_one_pattern_for_training_and_use(tokenizer, tmp_path):
    """Trained under one digit rule and used under another, "1234" changes its tokens."""
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.pattern == tokenizer.pattern == json.loads((tmp_path / DESCRIPTION).read_text())["pattern"]
    assert loaded.encode_ordinary("1234") == tokenizer.encode_ordinary("1234")
    assert [len(loaded.decode_bytes([i])) for i in loaded.encode_ordinary("1234")] == [2, 2]
    other = Tokenizer([*tokenizer.ranks, b"123"], tokenizer.pattern.replace("{1,2}", "{1,3}"))
    assert other.encode_ordinary("1234") != tokenizer.encode_ordinary("1234"), "the test can't tell the rules apart"
    other.save(tmp_path)
    assert Tokenizer.load(tmp_path).encode_ordinary("1234") == other.encode_ordinary("1234")


def test_training_is_a_function_of_the_text(tokenizer):
    assert train(iter(TEXT), 360).digest == tokenizer.digest
    assert train(TEXT[::-1], 360).digest == tokenizer.digest
    assert train([*TEXT, "zebra " * 50], 360).digest != tokenizer.digest


def test_a_tokenizer_on_disk_is_two_readable_files(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [RANKS, DESCRIPTION]
    loaded = Tokenizer.load(tmp_path / "new", digest=tokenizer.digest)
    assert (loaded.ranks, loaded.special, loaded.digest) == (tokenizer.ranks, tokenizer.special, tokenizer.digest)
    assert loaded.encode_ordinary(WORDS) == tokenizer.encode_ordinary(WORDS)
    ranks = load_tiktoken_bpe(str(tmp_path / "new" / RANKS))
    assert ranks == {token: rank for rank, token in enumerate(tokenizer.ranks)}


def test_loading_another_tokenizer_than_the_wanted_one_is_refused(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    with pytest.raises(UserError, match="not the wanted 000000000000: use the tokenizer"):
        Tokenizer.load(tmp_path, digest="0" * 64)


def test_the_digest_covers_ranks_pattern_and_specials(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    good = {name: (tmp_path / name).read_bytes() for name in (RANKS, DESCRIPTION)}
    lines = good[RANKS].splitlines(keepends=True)
    bad = {
        RANKS: [
            b"".join(lines[:-1]),
            b"".join([*lines[:300], lines[300], *lines[301:-1], lines[300]]),
            good[RANKS].replace(b"IHQ=", b"IHU="),
            b"!!! 0\n" + b"".join(lines[1:]),
            b"\n",
            b"",
        ],
        DESCRIPTION: [
            good[DESCRIPTION].replace(b"{1,2}", b"{1,3}"),
            good[DESCRIPTION].replace(b"351", b"350"),
            good[DESCRIPTION][:50],
            b"[]",
            b"",
        ],
    }
    for name, contents in bad.items():
        for content in contents:
            assert content != good[name]
            (tmp_path / name).write_bytes(content)
            with pytest.raises(UserError, match="is damaged") as caught:
                Tokenizer.load(tmp_path)
            assert "\n" not in str(caught.value)
        (tmp_path / name).write_bytes(good[name])
    assert Tokenizer.load(tmp_path).digest == tokenizer.digest


def test_missing_files_are_named(tokenizer, tmp_path):
    with pytest.raises(UserError, match=f"no tokenizer in .*{DESCRIPTION} is missing"):
        Tokenizer.load(tmp_path / "nowhere")
    tokenizer.save(tmp_path)
    (tmp_path / RANKS).unlink()
    with pytest.raises(UserError, match=f"{RANKS} is missing"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_below_bytes_and_specials_is_refused():
    with pytest.raises(UserError, match="pass vocab_size=265 or more"):
        train(TEXT, 264)
    assert train(TEXT, 265).encode_ordinary("ab") == [97, 98]


def test_a_text_too_small_for_the_vocabulary_says_what_it_gives():
    with pytest.raises(UserError, match="gives only 267 tokens: pass vocab_size=267") as caught:
        train(["abc"], 4096)
    size = int(re.search(r"vocab_size=(\d+)", str(caught.value))[1])
    assert train(["abc"], size).vocab_size == size


def test_what_goes_wrong_in_the_texts_reaches_the_caller():
    def texts():
        yield from TEXT
        raise UserError("a shard could not be fetched", "check the network")

    with pytest.raises(UserError, match="a shard could not be fetched"):
        train(texts(), 300)


def test_a_tokenizer_reaches_another_process(tokenizer):
    """Token shards are made in processes of their own, which get the tokenizer as an argument."""
    sent = ForkingPickler.loads(ForkingPickler.dumps(tokenizer))
    assert sent.encode_ordinary(WORDS) == tokenizer.encode_ordinary(WORDS)


@pytest.fixture(scope="module")
def runs_tokenizer() -> Tokenizer:
    """One that has learned long runs, which is what makes them slow."""
    runs = [mark * k for mark in "a .-\n\u3000" for k in range(1, 2000, 7)] + ["ab" * k for k in range(1, 2000, 9)]
    return train(runs, 360)


@pytest.mark.parametrize(
    "text",
    [
        "a" * LONG,
        " " * LONG,
        " " * LONG + "x",
        "\u3000" * (LONG // 3),
        "\n" * LONG,
        "-" * LONG,
        "ab" * (LONG // 2),
        " \n" * (LONG // 2),
        "\x1c" * LONG,
        "-\x1c" * (LONG // 2),
        "x " * (LONG // 2),
    ],
    ids=[
        "letters",
        "spaces",
        "spaces-x",
        "wide",
        "lines",
        "dashes",
        "pairs",
        "mixed",
        "controls",
        "dash-control",
        "prose",
    ],
)
@pytest.mark.slow
def test_a_document_of_5_mb_on_one_line(runs_tokenizer, text):
    """tiktoken alone panics on a million spaces, and its time for one piece grows faster than its length."""
    began = time.perf_counter()
    ids = runs_tokenizer.encode_batch([text])[0]
    took = time.perf_counter() - began
    # 5 MB of the slowest of these take about 3 s on one core of a small machine; without cuts minutes, or a panic
    assert took < 60
    assert runs_tokenizer.decode(ids) == text
    assert runs_tokenizer.encode_ordinary(text) == ids.tolist()


@pytest.mark.slow
def test_training_on_a_document_of_5_mb_on_one_line():
    assert train([" " * LONG, "a" * LONG, "x y " * 1000], 300).vocab_size == 300


@given(
    st.lists(st.tuples(st.sampled_from(["a", " ", "x y", "\n", "é\u3000", "\x1c"]), st.integers(1, 90_000)), max_size=4)
)
@settings(max_examples=60)
def test_segments_cut_only_long_runs_and_lose_nothing(parts):
    text = "".join(mark * count for mark, count in parts)
    found = list(segments(text))
    assert "".join(found) == text
    white = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"  # Unicode's White_Space
    longest = max((len(run) for part in found for run in re.findall(rf"{white}+|[^\s]+|[\x1c-\x1f]+", part)), default=0)
    assert longest < 2 * RUN
    for left, right in zip(found, found[1:], strict=False):
        run = left[-RUN:]
        assert len(run) == RUN, "a cut without a long run before it"
        assert re.fullmatch(rf"{white}+|[^\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+", run)
        assert right


def test_prose_is_never_cut():
    text = WORDS * 5000
    assert list(segments(text)) == [text]
