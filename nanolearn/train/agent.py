"""torchrun for a notebook: the same program, and no process of it outlives the kernel that started it.

A kernel that is killed can tell nobody. torchrun puts each worker into a session of its own, so that no signal to
a group of processes reaches them; without more they would go on and keep the devices. So Linux is asked to signal
each process when the one that started it dies: torchrun then gets SIGTERM and lets its workers save and stop; a
worker whose torchrun is gone gets SIGKILL. Elsewhere nobody sends such a signal.
"""

import ctypes
import os
import signal
import sys

STARTED_BY = "NANOLEARN_STARTED_BY"  # process id: each of kernel, torchrun and worker dies with the one before
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int, number: int) -> None:
    """Ask for signal `number` when the parent process dies; leave at once if it is dead already. Linux only.

    The signal comes when the *thread* that started this process ends, so start processes from one that waits for
    them. Taught in chapter 14_scaling_out.

    >>> die_with(os.getppid(), 0)  # 0: no signal
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent} started this one and is gone")


def die_with_starter(number: int) -> None:
    """`die_with` the process that left its number in the environment, if one did; our children then find ours.

    Taught in chapter 14_scaling_out.
    """
    if parent := os.environ.get(STARTED_BY):
        die_with(int(parent), number)
        os.environ[STARTED_BY] = str(os.getpid())


def _stop_once(number: int, _frame) -> None:
    # A dying process sends its signal once for each of its threads, and a second SIGTERM would end torchrun in the
    # middle of its workers' save.
    signal.signal(number, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """torchrun with this module's promise. Taught in chapter 14_scaling_out."""
    if sys.platform.startswith("linux"):
        signal.signal(signal.SIGUSR1, _stop_once)
        die_with_starter(signal.SIGUSR1)
    from torch.distributed.run import main as torchrun  # takes a second: ask first

    torchrun()


if __name__ == "__main__":
    main()
