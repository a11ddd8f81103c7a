"""Checks of a prefetcher that can resume: each runs with a time limit, so that an answer that hangs fails."""

import random
import threading
import time

PATIENCE = 2.0  # seconds for what takes milliseconds
QUIET = 0.06  # seconds in which a thread that reads too far would have done so


def _within(job):
    """The result of `job`, run in a thread, or an assertion where it doesn't come back."""
    result, errors = [], []

    def run():
        try:
            result.append(job())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "a call never came back: who would have woken it, and is that thread still there?"
    if errors:
        raise errors[0]
    return result[0]


def _until(condition, said):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, said
        time.sleep(0.005)


class _Text:
    """Rows 0, 1, 2, ... in batches of drawn lengths; counts the batches that were begun. Fails at a row, if asked."""

    def __init__(self, rows, seed=0, longest=4, fails_at=None):
        self.rows, self.longest, self.fails_at = rows, longest, fails_at
        self.draw, self.begun, self.error = random.Random(seed), 0, OSError("the disk is gone")

    def read(self, row):
        while row < self.rows:
            self.begun += 1
            if self.fails_at is not None and row >= self.fails_at:
                raise self.error
            size = min(self.draw.randint(1, self.longest), self.rows - row)
            yield list(range(row, row + size))
            row += size


def _ahead(answer, text, depth, row=0):
    return _within(lambda: answer.Ahead(text.read, depth, row))


def _next(ahead):
    return _within(lambda: next(ahead, None))


def _rest(ahead):
    return _within(lambda: list(ahead))


def _drain(ahead, rows, most=99):
    """Take batches into `rows` until the end or an error, which is returned."""
    try:
        while most and (batch := _next(ahead)) is not None:
            rows += batch
            most -= 1
    except OSError as error:
        return error
    return None


def check_same_batches_in_order(answer):
    """the same batches in the same order, to the last one, and then the end"""
    for rows in (0, 1, 2, 23):
        for depth in (1, 2, 50):
            ahead = _ahead(answer, _Text(rows, seed=rows), depth)
            got = _rest(ahead)
            wanted = list(_Text(rows, seed=rows).read(0))
            assert len(got) >= len(wanted), f"{len(got)} of {len(wanted)} batches came: what of those that lay ready?"
            assert got == wanted, f"depth {depth}: {got[:4]}... came, {wanted[:4]}... were read"
            assert _next(ahead) is None, "a batch came after the end"
            _within(ahead.close)


def check_reads_ahead(answer):
    """batches are read before anybody asks for them"""
    for depth in (1, 3):
        text = _Text(1000)
        ahead = _ahead(answer, text, depth)
        for handed in range(3):
            _until(
                lambda text=text, wanted=handed + depth: text.begun >= wanted,
                f"with depth {depth} and nobody asking, fewer than {depth} batches were read: who reads, and when?",
            )
            assert _next(ahead), "no batch came"
        _within(ahead.close)


def check_bounded(answer):
    """never more than `depth` batches are read and not handed out"""
    for depth in (1, 4):
        text = _Text(10_000)
        ahead = _ahead(answer, text, depth)
        for handed in range(3):
            time.sleep(QUIET)
            too_many = text.begun - handed
            assert too_many <= depth, (
                f"{too_many} batches are read and not handed out, with depth {depth}: count the one in the "
                "thread's hand, and look at when there is room, before or after reading"
            )
            assert _next(ahead), "no batch came"
        _within(ahead.close)


def check_row_counts_what_was_used(answer):
    """`row` is the next row not handed out, at every moment"""
    text = _Text(60, seed=3)
    ahead, expected = _ahead(answer, text, 4), 0
    time.sleep(QUIET)  # the thread is ahead by now
    assert ahead.row == 0, f"row is {ahead.row} before any batch was handed out: what does reading ahead change?"
    while (batch := _next(ahead)) is not None:
        expected += len(batch)
        assert ahead.row == expected, (
            f"row is {ahead.row} after rows 0 to {expected - 1} were handed out: which event moves it, and by how much?"
        )
    assert ahead.row == 60, f"row is {ahead.row} at the end of 60 rows"
    _within(ahead.close)
    assert ahead.row == 60, "closing changed the row"


def check_resume(answer):
    """stopped anywhere and begun again, every row is seen exactly once"""
    draw = random.Random(11)
    for _ in range(12):
        seen, row = [], 0
        rows = draw.randint(1, 50)
        while row < rows:
            text = _Text(rows, seed=draw.random())
            ahead = _ahead(answer, text, draw.randint(1, 6), row)
            assert ahead.row == row, f"it was begun at row {row} and says {ahead.row}"
            for _ in range(draw.randint(1, 5)):
                seen += _next(ahead) or []
            if draw.random() < 0.5:
                time.sleep(0.01)  # more lies ready when it is stopped
            _within(ahead.close)
            assert ahead.row > row, "no row was handed out"
            row = ahead.row
        assert seen == list(range(rows)), (
            f"over several stops the rows {seen[:12]}... were seen: are those missing, or twice there, "
            "that lay ready at a stop?"
        )


def check_error_passes_through(answer):
    """the reader's error comes in its turn, as the same object, once"""
    for depth in (1, 4):
        text = _Text(40, seed=5, fails_at=9)
        ahead, good = _ahead(answer, text, depth), []
        time.sleep(QUIET)  # with depth 4 the reader may have failed by now
        raised = _drain(ahead, good)
        assert raised, "the reader failed, and the loop ended as if the data had: who hears of its error?"
        assert raised is text.error, f"another error came: {raised!r}"
        assert len(good) >= 9, f"the error came after rows {good}, before batches that had been read"
        assert ahead.row == len(good), f"row is {ahead.row} after {len(good)} rows and an error"
        assert _next(ahead) is None, "after the error something else came than the end"
        _within(ahead.close)

    def at_once(row):
        raise OSError("no such file")

    ahead = _within(lambda: answer.Ahead(at_once, 2))
    raised = _drain(ahead, [])
    _within(ahead.close)
    assert isinstance(raised, OSError), "read(row) itself failed, and nobody heard of it"


def check_close_leaves_no_thread(answer):
    """no thread is left after close, the end of the data, or an error, whatever it was waiting for"""
    for taken, text in ((0, _Text(10_000)), (3, _Text(10_000)), (99, _Text(9)), (99, _Text(9, fails_at=4))):
        before = set(threading.enumerate())
        ahead = _ahead(answer, text, 2)
        _drain(ahead, [], taken)
        if taken < 99:
            time.sleep(QUIET)  # the thread waits for room
            begun = time.monotonic()
            _within(ahead.close)
            assert time.monotonic() - begun < 1.5, "closing took longer than a second"
            left = [thread for thread in threading.enumerate() if thread not in before]
            assert not left, "its thread is still there after close(): what is it waiting for, and who wakes it?"
        _until(
            lambda before=before: not [thread for thread in threading.enumerate() if thread not in before],
            "its thread is still there after the end of the data, or after an error",
        )
        _within(ahead.close)
        _within(ahead.close)
        read = text.begun
        assert _next(ahead) is None, "a batch came after close()"
        time.sleep(0.02)
        assert text.begun == read, "it went on reading after close()"
