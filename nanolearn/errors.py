"""The one error that is meant for a person.

Everything a person can cause (a wrong name, a full disk, a missing file) is raised as `UserError`; the command
line and the notebooks print its single line and stop. Any other exception is a bug of ours and keeps its traceback.
"""

GO_ON = 75  # exit code of what was stopped and wants to go on: EX_TEMPFAIL, "try again later", of sysexits.h


class UserError(Exception):
    """Something a person can put right, said in one line: what happened, then what to do.

    >>> str(UserError("depth 0 has no layers", "give a depth of 1 or more"))
    'depth 0 has no layers: give a depth of 1 or more'

    Taught in chapter 07_pretrain.
    """

    def __init__(self, happened: str, remedy: str = "") -> None:
        super().__init__(f"{happened}: {remedy}" if remedy else happened)

    def _render_traceback_(self) -> list[str]:
        # IPython asks an exception for its own rendering: a notebook then shows one line and no stack.
        return [f"UserError: {self}"]


class Unreachable(UserError):
    """What is to be fetched could not be had just now: the network, or the server; later it may.

    >>> issubclass(Unreachable, UserError)
    True

    Taught in chapter 07_pretrain.
    """
