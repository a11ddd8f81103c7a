"""Wrong: a last row that is not full is never returned."""

Piece = tuple[int, int, int]


def pack_at_most(lengths: list[int], capacity: int, k: int) -> list[list[Piece]]:
    width, rows, waiting = capacity - 1, [], []
    for doc, length in enumerate(lengths):
        start = 0
        while length - start >= width:
            rows.append([(doc, start, width)])
            start += width
        if start < length:
            waiting.append((start - length, doc, start))  # sorted: largest first, then the smallest document
    while waiting:
        row, room = [], capacity
        while len(row) < k and room > 1 and waiting:
            waiting.sort()
            fits = next((piece for piece in waiting if 1 - piece[0] <= room), None)
            piece = fits or waiting[0]
            waiting.remove(piece)
            left, doc, start = piece
            length = min(-left, room - 1)
            row.append((doc, start, length))
            room -= length + 1
            if fits is None:
                waiting.append((left + length, doc, start + length))
        if room <= 1 or len(row) == k or waiting:
            rows.append(row)
    return rows
