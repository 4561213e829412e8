"""See objects through their end and that of the program, and keep them out of forked children.

Knows nothing of what they are. Whatever is watched is told once when the interpreter ends and, in a
child process, right after a fork; nothing is kept alive by being watched. What is dropped before
leaves its work behind, which a thread finishes: an object may be collected on any thread, whatever
locks that holds.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class Unfinished(Protocol):
    """The work of an object, which must not refer to it."""

    def finish(self) -> None:
        """End it after the object is gone."""

    def abandon(self) -> None:
        """In a forked child: it goes on in the parent."""


_Told = weakref.WeakMethod["Callable[[], None]"]
_Watch = tuple[_Told, _Told, "weakref.finalize[[Unfinished], object]"]
_watched: weakref.WeakKeyDictionary[object, _Watch] = weakref.WeakKeyDictionary()
_finishing: dict[threading.Event, Unfinished] = {}


def watch(
    what: object,
    *,
    at_exit: Callable[[], None],
    in_child: Callable[[], None],
    work: Unfinished,
) -> None:
    """Have these methods of `what` called at the end of the program and in forked children, and its
    work finished when it is dropped."""
    dropped = weakref.finalize(what, _finish_in_background, work)
    dropped.atexit = False
    _watched[what] = weakref.WeakMethod(at_exit), weakref.WeakMethod(in_child), dropped


def let_be(what: object) -> None:
    """It has ended by itself."""
    told = _watched.pop(what, None)
    if told is not None:
        told[2].detach()


def _finish_in_background(work: Unfinished) -> None:
    over = threading.Event()
    _finishing[over] = work

    def finish() -> None:
        try:
            work.finish()
        except Exception:
            log.exception("what was under way could not be finished")
        finally:
            _finishing.pop(over, None)
            over.set()

    def start() -> None:
        try:
            threading.Thread(target=finish, name="laststep-finish", daemon=True).start()
        except RuntimeError:
            finish()

    try:
        # Starting a Thread takes a lock that whoever is interrupted here may hold: not from here.
        _thread.start_new_thread(start, ())
    except RuntimeError as error:  # too many threads, or the interpreter is ending
        _finishing.pop(over, None)
        log.warning("what was under way is left to the flusher: %s", error)


def _tell_at_exit() -> None:
    for at_exit, _, _ in list(_watched.values()):
        method = at_exit()
        if method is not None:
            method()
    for over in list(_finishing):
        over.wait()


def _after_fork() -> None:
    for _, in_child, dropped in list(_watched.values()):
        dropped.detach()
        method = in_child()
        if method is not None:
            method()
    for work in _finishing.values():
        work.abandon()
    _watched.clear()
    _finishing.clear()


atexit.register(_tell_at_exit)
os.register_at_fork(after_in_child=_after_fork)
