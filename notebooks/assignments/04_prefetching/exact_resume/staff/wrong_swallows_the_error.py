"""Wrong: the reader's error ends the data, as if it had come to its end."""

import threading
from collections import deque


class Ahead:
    def __init__(self, read, depth, row=0):
        self._read, self._depth, self._row = read, depth, row
        self._ready, self._change = deque(), threading.Condition()
        self._error, self._ended, self._closed = None, False, False
        self._thread = threading.Thread(target=self._run, args=(row,), daemon=True)
        self._thread.start()

    @property
    def row(self):
        return self._row

    def _run(self, row):
        try:
            batches = self._read(row)
            while self._room():
                batch = next(batches, None)
                if batch is None:
                    return
                with self._change:
                    self._ready.append(batch)
                    self._change.notify_all()
        except BaseException:
            pass
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()

    def _room(self):
        """Wait until one more may be read; False once it is closed."""
        with self._change:
            self._change.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            return not self._closed

    def __iter__(self):
        return self

    def __next__(self):
        with self._change:
            self._change.wait_for(lambda: self._closed or self._ready or self._ended)
            if self._closed:
                raise StopIteration
            if self._ready:
                batch = self._ready.popleft()
                self._row += len(batch)
                self._change.notify_all()
                return batch
            error, self._error = self._error, None
            raise error or StopIteration

    def close(self):
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()
