"""From text to token ids and back: byte-pair encoding, trained by rustbpe and run by tiktoken.

One pattern cuts text into pieces before any merge, in training and in use, and is stored with the ranks: a tokenizer
trained under one digit rule and used under another reads "1234" differently and nobody notices. A tokenizer on disk
is tiktoken's rank file and one JSON file; loading it runs no code, and a digest over ranks, pattern and special
tokens says whether two tokenizers are the same.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import rustbpe
import tiktoken
from pydantic import BaseModel, ConfigDict, ValidationError

from nanolearn.errors import UserError
from nanolearn.fetch import replacing

SPECIAL = (
    "<|bos|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)

# GPT-4's pattern, but numbers in groups of one or two digits: a small vocabulary can't afford the 1,110 tokens of
# all numbers up to three digits.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)

RANKS = "ranks.tiktoken"
DESCRIPTION = "tokenizer.json"
GROUP = 64  # texts handed to a thread at once: a lead paragraph takes 0.1 ms, as long as waking a thread
RUN = 1 << 15  # characters of one unbroken run after which it is cut (see `segments`)

# Rust's \s lacks the four separators that Python's has; the runs to be cut are Rust's.
_SPACE = re.compile(r"[^\S\x1c-\x1f]")
_INK = re.compile(r"[\S\x1c-\x1f]")
_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")


class Tokenizer:
    """A byte-pair vocabulary with the nine special tokens behind it.

    `ranks[i]` holds the bytes of token i; special tokens take the ids after them. Any text round-trips exactly,
    but for lone surrogates (half a UTF-16 pair, not text), which become U+FFFD.

    >>> tokenizer = Tokenizer([bytes([i]) for i in range(256)] + [b"he", b"hel"])
    >>> tokenizer.encode_ordinary("help"), tokenizer.decode([257, 112])
    ([257, 112], 'help')
    >>> tokenizer.bos, tokenizer.vocab_size
    (258, 267)

    Taught in chapter 01_tokenizer.
    """

    def __init__(self, ranks: Sequence[bytes], pattern: str = PATTERN) -> None:
        self.ranks = tuple(ranks)
        self.pattern = pattern
        self.special = {token: len(self.ranks) + i for i, token in enumerate(SPECIAL)}
        self.bos = self.special["<|bos|>"]
        self.vocab_size = len(self.ranks) + len(SPECIAL)
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        self._encoding = tiktoken.Encoding(
            "nanolearn",
            pat_str=pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(self.ranks)},
            special_tokens=self.special,
        )

    def encode_ordinary(self, text: str) -> list[int]:
        """Token ids of a text; what looks like a special token is text like any other.

        Taught in chapter 01_tokenizer.
        """
        return [i for part in segments(clean(text)) for i in self._encoding.encode_ordinary(part)]

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[np.ndarray]:
        """`encode_ordinary` of many texts, one array a text: uint16, or uint32 above 65,536 tokens.

        Threads run in parallel, because tiktoken lets go of Python's lock while it encodes.

        Taught in chapter 01_tokenizer.
        """
        groups = [texts[i : i + GROUP] for i in range(0, len(texts), GROUP)]
        if num_threads <= 1 or len(groups) <= 1:
            return [self._encode_array(text) for text in texts]
        with ThreadPoolExecutor(num_threads) as pool:
            done = pool.map(lambda group: [self._encode_array(text) for text in group], groups)
            return [ids for group in done for ids in group]

    def _encode_array(self, text: str) -> np.ndarray:
        # An array from Rust's buffer: a list of Python integers costs a third of the encoding on top.
        parts = [self._encoding.encode_to_numpy(part, disallowed_special=()) for part in segments(clean(text))]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(self.dtype)  # (tokens,)

    def encode(self, text: str, allowed_special: Iterable[str] | Literal["all"] = ()) -> list[int]:
        """Token ids of a text in which the named special tokens mean themselves; "all" names all nine.

        Raises UserError for a name that is no special token.

        >>> tokenizer = Tokenizer([bytes([i]) for i in range(256)])
        >>> tokenizer.encode("<|bos|>a", allowed_special={"<|bos|>"}), len(tokenizer.encode("<|bos|>a"))
        ([256, 97], 8)

        Taught in chapter 12_finetuning.
        """
        allowed = set(SPECIAL) if allowed_special == "all" else set(allowed_special)
        if unknown := allowed - set(SPECIAL):
            raise UserError(f"{min(unknown)!r} is not a special token", f"they are {', '.join(SPECIAL)}")
        ids: list[int] = []
        ordinary: list[str] = []
        for part in _SPECIAL.split(text):
            if part in allowed:
                ids += self.encode_ordinary("".join(ordinary)) + [self.special[part]]
                ordinary = []
            else:
                ordinary.append(part)
        return ids + self.encode_ordinary("".join(ordinary))

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """The exact bytes of token ids, special tokens written out.

        Taught in chapter 01_tokenizer.
        """
        return self._encoding.decode_bytes(np.asarray(ids, dtype=np.int64).tolist())

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of token ids; bytes that are no UTF-8 (a character cut in two) show as U+FFFD.

        Taught in chapter 01_tokenizer.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """How many bytes each token stands for, int64 (vocab_size,); special tokens stand for 0.

        Raw bytes: the token 0x80 is one byte, though alone it would be shown as a three-byte U+FFFD.

        >>> Tokenizer([bytes([i]) for i in range(256)] + [b"he"]).token_bytes()[[0x80, 256, 257]].tolist()
        [1, 2, 0]

        Taught in chapter 10_evaluation.
        """
        return np.array([len(token) for token in self.ranks] + [0] * len(SPECIAL), dtype=np.int64)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over ranks, pattern and special tokens: equal means the same tokens for every text.

        Taught in chapter 01_tokenizer.
        """
        return _digest(self.ranks, self.pattern, self.special)

    def save(self, directory: Path | str) -> None:
        """Write `ranks.tiktoken` and `tokenizer.json` into a directory, each whole or not at all.

        Taught in chapter 01_tokenizer.
        """
        directory = Path(directory)
        with replacing(directory / RANKS) as path:
            path.write_bytes(_rank_file(self.ranks))
        description = Description(pattern=self.pattern, special_tokens=self.special, digest=self.digest)
        with replacing(directory / DESCRIPTION) as path:
            path.write_text(description.model_dump_json(indent=2), encoding="utf-8")

    @classmethod
    def load(cls, directory: Path | str, digest: str | None = None) -> "Tokenizer":
        """Read a saved tokenizer and compare its digest with the recorded one, and with `digest` if given.

        Raises UserError for missing or damaged files, and for another tokenizer than the one asked for.

        Taught in chapter 01_tokenizer.
        """
        directory = Path(directory)
        try:
            description = Description.model_validate_json((directory / DESCRIPTION).read_bytes())
            lines = (directory / RANKS).read_bytes().splitlines()
            ranks = [base64.b64decode(line.split()[0], validate=True) for line in lines]
        except FileNotFoundError as error:
            raise UserError(f"no tokenizer in {directory}", f"{Path(error.filename).name} is missing") from None
        except (ValidationError, ValueError, IndexError, binascii.Error) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"the tokenizer in {directory} is damaged ({reason})", "train it again") from None
        found = _digest(ranks, description.pattern, description.special_tokens)
        expected = {token: len(ranks) + i for i, token in enumerate(SPECIAL)}
        if found != description.digest or description.special_tokens != expected:
            raise UserError(f"the tokenizer in {directory} is damaged (its digest differs)", "train it again")
        if digest is not None and digest != found:
            message = f"the tokenizer in {directory} is {found[:12]}, not the wanted {digest[:12]}"
            raise UserError(message, "use the tokenizer that the tokens or weights were made with")
        return cls(ranks, description.pattern)


class Description(BaseModel):
    """tokenizer.json: all of a tokenizer but its ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: str
    special_tokens: dict[str, int]
    digest: str


def _rank_file(ranks: Sequence[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))


def _digest(ranks: Sequence[bytes], pattern: str, special: dict[str, int]) -> str:
    head = json.dumps([pattern, special])
    return hashlib.sha256(head.encode() + b"\n" + _rank_file(ranks)).hexdigest()


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-pair ranks on texts; `vocab_size` counts the 256 bytes, the merges and the nine special tokens.

    The same texts give the same tokenizer, whatever their order over threads. 17 MB take about 3 s on two cores.
    Raises UserError for a vocabulary below 265, and for texts too small to fill it (said with the size they fill).
    Source: Sennrich et al., ACL 2016 (arXiv 1508.07909), on bytes as in GPT-2.

    >>> train(["low lower lowest"] * 9, vocab_size=268).decode([256, 257, 258])
    'lolow low'

    Taught in chapter 01_tokenizer.
    """
    wanted = vocab_size - len(SPECIAL)
    if wanted < 256:
        least = 256 + len(SPECIAL)
        raise UserError(
            f"a vocabulary of {vocab_size} can't hold the 256 bytes and {len(SPECIAL)} special tokens",
            f"pass vocab_size={least} or more",
        )
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator((part for text in texts for part in segments(clean(text))), wanted, pattern=PATTERN)
    ranks = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
    if len(ranks) < wanted:
        size = len(ranks) + len(SPECIAL)
        raise UserError(
            f"the text is too small for a vocabulary of {vocab_size}: it gives only {size} tokens",
            f"pass vocab_size={size}, or more text",
        )
    return Tokenizer(ranks)


def clean(text: str) -> str:
    """A text that UTF-8 can hold: surrogate pairs are joined, lone surrogates become U+FFFD.

    >>> clean("a\\ud83d\\ude00b"), clean("a\\ud83db")
    ('a😀b', 'a\ufffdb')

    Taught in chapter 01_tokenizer.
    """
    try:
        text.encode()  # costs a copy, a hundredth of the tokenising
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def segments(text: str) -> Iterator[str]:
    """Cut a text inside its unbroken runs, so that no run is longer than 65,535 characters.

    A run is whitespace only, or has none. tiktoken's matcher ends in a stack overflow on a million spaces, and a
    piece of a million letters takes a second. A block of 32,768 characters that is all one run ends in a cut; so
    tokens don't reach over that cut, which changes nothing but the count, and only in text that is not prose.

    >>> [len(part) for part in segments("ab " * 50_000)], [len(part) for part in segments("a" * 100_000)]
    ([150000], [32768, 32768, 32768, 1696])

    Taught in chapter 01_tokenizer.
    """
    start = 0
    for block in range(0, len(text) - RUN + 1, RUN):
        end = block + RUN
        if not (_SPACE.search(text, block, end) and _INK.search(text, block, end)):
            yield text[start:end]
            start = end
    if start < len(text) or not text:
        yield text[start:]
