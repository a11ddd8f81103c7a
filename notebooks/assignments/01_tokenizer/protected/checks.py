"""Checks of a byte-pair trainer with protected spans, against a slow one that marks every byte."""

import random
from collections import Counter


def _expected(pieces, merges, protected):
    """The rules read aloud: units are (bytes, free), and a pair needs two free ones."""
    words = []
    for piece, count in pieces.items():
        units, at = [], 0
        while at < len(piece):
            spans = [span for span in protected if piece[at : at + len(span)] == span]
            unit = max(spans, key=len) if spans else piece[at : at + 1]
            units.append((unit, not spans))
            at += len(unit)
        words.append((units, count))
    out = []
    for _ in range(merges):
        counts = Counter()
        for units, count in words:
            for (a, free), (b, other) in zip(units, units[1:], strict=False):
                if free and other:
                    counts[a, b] += count
        if not counts:
            break
        most = max(counts.values())
        ties = [pair for pair in counts if counts[pair] == most]
        longest = max(len(a) + len(b) for a, b in ties)
        pair = min(p for p in ties if len(p[0]) + len(p[1]) == longest)
        out.append(pair)
        for units, _ in words:
            at = 0
            while at + 1 < len(units):
                if units[at] == (pair[0], True) and units[at + 1] == (pair[1], True):
                    units[at : at + 2] = [(pair[0] + pair[1], True)]
                at += 1
    return out


def _learn(answer, pieces, merges, protected=()):
    return [tuple(map(bytes, pair)) for pair in answer.learn(dict(pieces), merges, list(protected))]


def _drawn(seed):
    draw = random.Random(seed)
    letters = draw.choice([b"ab", b"abc", b"aabcx"])
    pieces = {}
    for _ in range(draw.randint(2, 9)):
        pieces[bytes(draw.choices(letters, k=draw.randint(1, 12)))] = draw.randint(1, 5)
    protected = {bytes(draw.choices(letters, k=draw.randint(1, 3))) for _ in range(draw.randint(0, 3))}
    return pieces, draw.randint(1, 12), sorted(protected, key=lambda span: draw.random())


def check_worked_example(answer):
    """the corpus of the chapter, without protected spans"""
    pieces = {b"low": 5, b"lower": 2, b"newest": 6, b"widest": 3}
    learned = _learn(answer, pieces, 3)
    assert learned[:1] == [(b"e", b"s")], f"the first merge was {learned[:1]}: which pairs stand there most often?"
    assert learned == [(b"e", b"s"), (b"es", b"t"), (b"l", b"o")], f"the first three merges were {learned}"


def check_ties(answer):
    """equally frequent pairs: the longest merged token, then the smallest pair"""
    learned = _learn(answer, {b"abab": 4, b"xy": 4}, 3)
    assert learned[0] == (b"a", b"b"), "the pair (a, b) stands twice in abab: is every place counted?"
    assert learned[1] == (b"ab", b"ab"), (
        f"after ab, two pairs stand there 4 times; {learned[1]} was merged: compare the lengths of what they give"
    )
    assert _learn(answer, {b"zz": 3, b"aa": 3, b"mm": 3}, 3) == [(b"a", b"a"), (b"m", b"m"), (b"z", b"z")], (
        "equal counts and equal lengths: the order of bytes decides"
    )
    assert _learn(answer, {b"aaa": 2, b"bc": 3}, 1) == [(b"a", b"a")], "how often does (a, a) stand in aaa?"
    assert _learn(answer, {b"ab": 1, b"cd": 5}, 1) == [(b"c", b"d")], "a piece counts as often as its text has it"


def check_protected_spans(answer):
    """protected strings stay whole, merge with nothing, and keep their neighbours apart"""
    learned = _learn(answer, {b"aNaClb": 9, b"ab": 1}, 5, [b"NaCl"])
    assert learned == [(b"a", b"b")], f"only a and b of the second piece may merge, but {learned} was learned"
    learned = _learn(answer, {b"xNay": 5, b"NaCl": 7, b"Cl": 1}, 5, [b"Na", b"NaCl"])
    assert learned == [(b"C", b"l")], (
        f"{learned}: where two protected strings begin at one place, which one is the unit?"
    )
    assert _learn(answer, {b"aaaa": 3}, 4, [b"aa"]) == [], "aaaa is two protected units, and no byte is left over"
    learned = _learn(answer, {b"NaCl": 5, b"Na": 4}, 3, [b"NaCl"])
    assert learned == [(b"N", b"a")], f"{learned}: Na alone is not protected, only NaCl"


def check_random_corpora(answer):
    """the same merges as a slow trainer on random corpora"""
    for seed in range(400):
        pieces, merges, protected = _drawn(seed)
        learned, wanted = _learn(answer, pieces, merges, protected), _expected(pieces, merges, protected)
        for number, (mine, right) in enumerate(zip(learned, wanted, strict=False)):
            assert mine == right, (
                f"pieces {pieces}, protected {protected}: merge {number} was {mine}; count the pairs "
                "by hand at this point"
            )
        assert len(learned) == len(wanted), f"pieces {pieces}, protected {protected}: {len(learned)} merges"


def check_it_ends(answer):
    """training stops when no pair is left, and never returns more merges than asked for"""
    assert _learn(answer, {b"ab": 1}, 100) == [(b"a", b"b")], (
        "a pair that stands there once is merged, then none is left"
    )
    assert _learn(answer, {b"a": 3, b"b": 2}, 5) == [], "pieces of one byte have no pair: training ends at once"
    assert len(_learn(answer, {b"abcdefgh": 2}, 4)) == 4, "at most `merges` merges"
    assert _learn(answer, {b"abcd": 2}, 0) == [], "0 merges were asked for"
