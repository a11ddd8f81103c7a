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
HANDLER = "_terminate_process_handler"  # torch's, which every signal that it registers goes to
SIGNALS, SIGNALS_OPTION = "TORCHELASTIC_SIGNALS_TO_HANDLE", "--signals-to-handle"
STOP = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # each lets torchrun's workers save and stop


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


def _stop_once(*_) -> None:
    # A dying process sends its signal once for each of its threads, and Slurm sends SIGTERM to all processes of a job
    # at once: a second one would end torchrun in the middle of its workers' save.
    from torch.distributed.elastic.multiprocessing.api import SignalException

    for name in STOP:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    raise SignalException("asked to stop", sigval=signal.SIGTERM)


def main() -> None:
    """torchrun with this module's promise. Taught in chapter 14_scaling_out."""
    if sys.platform.startswith("linux"):
        die_with_starter(signal.SIGUSR1)  # until there are workers it ends this process, and then it stops them
        os.environ[SIGNALS] = ",".join(STOP)
    from torch.distributed.elastic.multiprocessing import api  # takes a second: ask first
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import main as torchrun

    setattr(api, HANDLER, _stop_once)
    # Where torchrun has an option for it, the option's usual value replaces the variable's.
    if sys.platform.startswith("linux") and SIGNALS_OPTION in get_args_parser().format_help():
        sys.argv.insert(1, f"{SIGNALS_OPTION}={os.environ[SIGNALS]}")
    torchrun()


if __name__ == "__main__":
    main()
