"""See objects through the end of the program, and keep them out of forked children.

Knows nothing of what they are. Whatever is watched is told once when the interpreter ends and, in a
child process, right after a fork; nothing is kept alive by being watched.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_Told = weakref.WeakMethod["Callable[[], None]"]
_watched: weakref.WeakKeyDictionary[object, tuple[_Told, _Told]] = weakref.WeakKeyDictionary()


def watch(what: object, *, at_exit: Callable[[], None], in_child: Callable[[], None]) -> None:
    """Have these methods of `what` called at the end of the program and in forked children."""
    _watched[what] = weakref.WeakMethod(at_exit), weakref.WeakMethod(in_child)


def let_be(what: object) -> None:
    """It has ended by itself."""
    _watched.pop(what, None)


def _tell(which: int) -> None:
    for told in list(_watched.values()):
        method = told[which]()
        if method is not None:
            method()


def _after_fork() -> None:
    _tell(1)
    _watched.clear()


atexit.register(_tell, 0)
os.register_at_fork(after_in_child=_after_fork)
