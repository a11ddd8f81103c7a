"""papermill, out of the way of signals: `python -m nanolearn.cli.headless PAPERMILL_ARGUMENTS`.

Slurm sends SIGTERM to every process of a job. papermill would kill its kernel at once, in the middle of a save. Here
it works in a thread, where it takes no signals, and the main thread lets them pass: `nanolearn run` hands the wish to
stop on to the kernel, and papermill still writes the report.
"""

import signal
import sys
import threading
import traceback

from nanolearn.train.agent import die_with_starter

STOP = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]


def main() -> int:
    """Run papermill with this process's arguments and return its exit code; its starter's death is its own.

    Taught in chapter 07_pretrain.

    >>> signal.SIGTERM in STOP
    True
    """
    die_with_starter(signal.SIGKILL)
    for number in STOP:
        # A function and not SIG_IGN, which the kernel would inherit.
        signal.signal(number, lambda *_: None)
    codes: list[int] = []

    def work() -> None:
        from papermill.__main__ import papermill

        try:
            papermill(sys.argv[1:], prog_name="papermill")
        except SystemExit as ended:
            codes.append(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        except BaseException:
            traceback.print_exc()

    thread = threading.Thread(target=work, name="papermill")
    thread.start()
    thread.join()
    return codes[0] if codes else 1


if __name__ == "__main__":
    sys.exit(main())
