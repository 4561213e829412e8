"""See objects through the end of the program, and keep them out of forked children.

Knows nothing of what they are. Whatever is watched is told once when the interpreter ends and, in a
child process, right after a fork. It is kept alive until it says that it has ended by itself: what
it has under way must be finished on the main thread, before the interpreter takes torch down.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING

from laststep.errors import Usage

if TYPE_CHECKING:
    from collections.abc import Callable

_watched: dict[int, tuple[object, Callable[[], None], Callable[[], None]]] = {}


def watch(what: object, *, at_exit: Callable[[], None], in_child: Callable[[], None]) -> None:
    """Have these called at the end of the program and in forked children."""
    _watched[id(what)] = what, at_exit, in_child


def let_be(what: object) -> None:
    """It has ended by itself."""
    _watched.pop(id(what), None)


def weakly(act: Callable[[], bool]) -> Callable[[], bool]:
    """A method that does not keep its object alive; True when that is gone: there is no more to
    be done."""
    reference = weakref.WeakMethod(act)

    def if_there() -> bool:
        method = reference()
        return method is None or method()

    return if_there


def check_process(what: str, pid: int) -> None:
    """`Usage` in a process that was forked from the one that made something."""
    if os.getpid() != pid:
        raise Usage(
            f"cannot {what} in a forked process",
            expected=f"process {pid}, which made the Checkpointer",
            found=f"process {os.getpid()}",
            remedy="make one in this process, with a run of its own",
        )


def _tell_at_exit() -> None:
    for _, at_exit, _ in list(_watched.values()):
        at_exit()


def _after_fork() -> None:
    for _, _, in_child in list(_watched.values()):
        in_child()
    _watched.clear()


atexit.register(_tell_at_exit)
os.register_at_fork(after_in_child=_after_fork)
