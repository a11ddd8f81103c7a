"""Wrong: a rest that goes on is packed as if it needed no BOS, so rows overflow by one token."""

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
            fits = next((piece for piece in waiting if (1 if piece[2] == 0 else 0) - piece[0] <= room), None)
            piece = fits or waiting[0]
            waiting.remove(piece)
            left, doc, start = piece
            length = min(-left, room - 1 if start == 0 else room)
            row.append((doc, start, length))
            room -= length + (1 if start == 0 else 0)
            if fits is None:
                waiting.append((left + length, doc, start + length))
        rows.append(row)
    return rows
