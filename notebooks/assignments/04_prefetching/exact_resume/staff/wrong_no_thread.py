"""Wrong: nothing is read before it is asked for; order, rows and errors are right, and nothing is gained."""


class Ahead:
    def __init__(self, read, depth, row=0):
        self._read, self.row, self._batches, self._over = read, row, None, False

    def __iter__(self):
        return self

    def __next__(self):
        if self._over:
            raise StopIteration
        try:
            self._batches = self._batches or self._read(self.row)
            batch = next(self._batches)
        except BaseException:
            self._over = True
            raise
        self.row += len(batch)
        return batch

    def close(self):
        self._over = True
