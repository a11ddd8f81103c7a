"""Checks of a packer that puts at most k pieces into a row, against a slow one and by counting."""

import random


def _drawn(seed, most=24, longest=30):
    draw = random.Random(seed)
    return [draw.randint(1, longest) for _ in range(draw.randint(1, most))], draw.randint(2, 20), draw.randint(1, 6)


def _expected(lengths, capacity, k):
    """The rules read aloud, token by token of room; slower and longer than an answer has to be."""
    rows, left = [], {doc: [0, length] for doc, length in enumerate(lengths)}
    for doc, span in left.items():
        while span[1] - span[0] >= capacity - 1:
            rows.append([(doc, span[0], capacity - 1)])
            span[0] += capacity - 1
    while any(begin < end for begin, end in left.values()):
        row, room = [], capacity
        while len(row) < k and room >= 2:
            there = [doc for doc, (begin, end) in left.items() if begin < end]
            fitting = [doc for doc in there if left[doc][1] - left[doc][0] + 1 <= room]
            if not there:
                break
            doc = max(fitting or there, key=lambda doc: (left[doc][1] - left[doc][0], -doc))
            take = min(left[doc][1] - left[doc][0], room - 1)
            row.append((doc, left[doc][0], take))
            left[doc][0] += take
            room -= take + 1
        rows.append(row)
    return rows


def _pack(answer, lengths, capacity, k):
    rows = answer.pack_at_most(list(lengths), capacity, k)
    return [[tuple(int(number) for number in piece) for piece in row] for row in rows]


def check_worked_example(answer):
    """three documents in rows of 8 with at most two pieces each"""
    rows = _pack(answer, [6, 4, 2], 8, 2)
    assert rows == [[(0, 0, 6)], [(1, 0, 4), (2, 0, 2)]], (
        f"lengths 6, 4, 2 with capacity 8 and k 2 gave {rows}: write down the size of each piece with its BOS, and the "
        "room that is left after each step"
    )


def check_at_most_k(answer):
    """no row has more than k pieces or more than capacity tokens"""
    for seed in range(150):
        lengths, capacity, k = _drawn(seed)
        for row in _pack(answer, lengths, capacity, k):
            assert 1 <= len(row) <= k, f"{len(row)} pieces in a row where k is {k}: which pieces count?"
            used = sum(length + 1 for _, _, length in row)
            assert used <= capacity, f"{used} tokens in a row of {capacity}: every piece has a BOS, a rest too"


def check_nothing_is_lost_or_seen_twice(answer):
    """every token of every document lies in exactly one row"""
    for seed in range(150):
        lengths, capacity, k = _drawn(1000 + seed)
        seen = [[0] * length for length in lengths]
        for row in _pack(answer, lengths, capacity, k):
            for doc, start, length in row:
                assert length >= 1, "a piece without text: a row of nothing but BOS trains on nothing"
                for at in range(start, start + length):
                    assert at < lengths[doc], f"a piece reaches beyond the end of document {doc}"
                    seen[doc][at] += 1
        missing = sum(count == 0 for document in seen for count in document)
        assert not missing, f"{missing} tokens are in no row: what becomes of the part that did not fit?"
        assert all(count == 1 for document in seen for count in document), "a token is in two rows"


def check_choices(answer):
    """the pieces are the ones that the rules choose, ties included"""
    for seed in range(250):
        lengths, capacity, k = _drawn(2000 + seed)
        rows = _pack(answer, lengths, capacity, k)
        wanted = _expected(lengths, capacity, k)
        for number, (row, right) in enumerate(zip(rows, wanted, strict=False)):
            assert row == right, (
                f"lengths {lengths}, capacity {capacity}, k {k}: row {number} is {row}; go through rules 2 and 3 "
                "for it: which waiting piece is the largest that fits, and which one is cut when none fits?"
            )
        assert len(rows) == len(wanted), f"lengths {lengths}, capacity {capacity}, k {k}: {len(rows)} rows"


def check_full_rows_where_k_allows(answer):
    """only rows with k pieces, and the last one, are padded"""
    for seed in range(150):
        lengths, capacity, k = _drawn(3000 + seed)
        rows = _pack(answer, lengths, capacity, k)
        assert rows, "documents came in and no row came out"
        for row in rows[:-1]:
            room = capacity - sum(length + 1 for _, _, length in row)
            assert room <= 1 or len(row) == k, f"{room} tokens of padding after {len(row)} pieces, k is {k}: rule 3"


def check_large_k_is_plain_best_fit(answer):
    """with k as large as a row, every row but the last is full to one token"""
    draw = random.Random(7)
    lengths = [draw.randint(1, 300) for _ in range(400)]
    rows = _pack(answer, lengths, 65, 65)
    padded = [row for row in rows[:-1] if sum(length + 1 for _, _, length in row) < 64]
    assert not padded, f"{len(padded)} rows are padded although k never binds"
    assert sum(length for row in rows for _, _, length in row) == sum(lengths), "tokens are missing"
