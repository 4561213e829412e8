"""All errors that laststep raises deliberately, grouped by what the caller can do about them.

Depends on no other module of the library. A message states the problem, the place, the expected and
the found value, and the remedy. Errors are sent from the flusher process to the trainer as `(kind,
fields)`, with `to_wire` and `from_wire`; they are never pickled.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_SHOWN_PROBLEMS = 10
_PARTS = ("where", "expected", "found", "remedy")
_WIRED = ("what", *_PARTS, "missing", "transient", "device_failed")


class LaststepError(Exception):
    """Base class of all errors that laststep raises deliberately.

    `what`, `where`, `expected`, `found` and `remedy` hold the parts of the message; all but `what`
    may be None.
    """

    usual_remedy: str | None = None
    """The default remedy of this kind of error."""
    missing: str | None = None
    """The name of the missing file within its store, if the error is about a missing file."""
    step: int | None = None
    """The step of the failed save, if the error made a save fail."""
    lines: tuple[str, ...] = ()
    """Further lines of the message, one for each of several problems."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.remedy = self.usual_remedy if remedy is None else remedy
        super().__init__(what)

    def __str__(self) -> str:
        text = self._message()
        if self.step is None or re.search(rf"\bstep {self.step}\b", text):
            return text
        return f"the save of step {self.step} failed: {text}"

    def without_remedy(self) -> str:
        """Return the message without remedy and step, for readers who cannot apply them."""
        return self._message(with_remedy=False)

    def of_save(self, step: int) -> Self:
        """Return a copy of the error for the save of one step; several may fail for one reason."""
        copied = copy.copy(self)
        copied.__cause__, copied.step = self.__cause__, step
        return copied

    def amended(self, **fields: str | None) -> Self:
        """Return a copy of the error with other parts of the message."""
        amended = copy.copy(self)
        vars(amended).update(fields)
        return amended

    def lacking(self, name: str) -> Self:
        """Record the name of the missing file; return the error itself."""
        self.missing = name
        return self

    def _message(self, *, with_remedy: bool = True) -> str:
        text = self.what if self.where is None else f"{self.what} at {self.where}"
        facts = (("expected", self.expected), ("found", self.found))
        if shown := ", ".join(f"{name} {fact}" for name, fact in facts if fact is not None):
            text += f": {shown}"
        if self.remedy is not None and with_remedy:
            text += f"; {self.remedy}"
        if not self.lines:
            return text
        left = len(self.lines) - _SHOWN_PROBLEMS
        more = (f"… and {left} more",) if left > 0 else ()
        shown = "\n  ".join((f"{text}:", *self.lines[:_SHOWN_PROBLEMS], *more))
        # A long list may scroll the remedy away, so it is repeated.
        return f"{shown}\n{self.remedy}" if more and self.remedy and with_remedy else shown

    def to_wire(self) -> tuple[str, dict[str, str | None]]:
        """Return the error as plain values for `from_wire` in another process."""
        fields = {name: getattr(self, name, None) for name in _WIRED}
        return type(self).__name__, {name: str(value) for name, value in fields.items() if value}


class NotFoundError(LaststepError):
    """The run, checkpoint, item or tensor does not exist."""

    usual_remedy = "check the name; see `laststep ls` and `laststep show --all`"


class AlreadyExistsError(LaststepError):
    """The name is taken: this lineage already has the step, or the path exists."""

    usual_remedy = "use another name, or remove what is there"


class CorruptError(LaststepError):
    """Stored bytes differ from those written. An older checkpoint may still be intact."""

    usual_remedy = (
        "`laststep verify` lists all damage; restore() without a step takes the newest good "
        "checkpoint"
    )


class Problems(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between a checkpoint and the live state; empty, and false, if there are none.

    Found in `MismatchError.problems` and, with strict=False, in `Restored.problems`.
    """

    missing: tuple[str, ...] = ()
    """Full names, `item` or `item/name`, that the live state has and the checkpoint lacks."""
    unexpected: tuple[str, ...] = ()
    """Full names that the checkpoint has and the live state lacks."""
    mismatched: tuple[str, ...] = ()
    """One text for each entry that both have but with another shape, dtype, class or structure."""

    def __len__(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.mismatched)

    def lines(self) -> tuple[str, ...]:
        return (
            *(f"missing: {name} is not in the checkpoint" for name in self.missing),
            *(f"unexpected: {name} is not in the live state" for name in self.unexpected),
            *(f"mismatched: {text}" for text in self.mismatched),
        )


class MismatchError(LaststepError):
    """The checkpoint is intact but does not fit the live state, or the ranks of a job do not fit
    each other; `.problems` lists all differences."""

    problems: Problems = Problems()
    """All differences; the message shows the first ten."""

    @classmethod
    def of(
        cls,
        problems: Problems,
        *,
        where: str,
        remedy: str,
        what: str = "the checkpoint does not fit the live state",
    ) -> MismatchError:
        places = "1 place" if len(problems) == 1 else f"{len(problems)} places"
        error = cls(f"{what} in {places}", where=where, remedy=remedy)
        error.problems, error.lines = problems, problems.lines()
        return error


class StorageError(LaststepError):
    """The store could not be read or written. If `transient` is true, trying again may help."""

    usual_remedy = "check the log, the disk and `dmesg`, and try again"
    transient: bool = False
    device_failed: bool = False
    """True if a device could not read back stored bytes. Only that counts as damage."""


class AbortedError(LaststepError):
    """The save was aborted, here or by another writer, and nothing of it was committed."""

    usual_remedy = "the next save tries again"


class TornCaptureError(LaststepError):
    """The state changed while it was captured; nothing of that save was committed."""

    usual_remedy = "the next save tries again"


class UsageError(LaststepError):
    """The call is invalid and will fail again if it is repeated unchanged."""

    usual_remedy = "pass what is expected; docs/guides/api.md has all arguments"


def brief(error: BaseException) -> str:
    """Return the message of any error for other readers, without the remedy."""
    if isinstance(error, LaststepError):
        return error.without_remedy()
    return str(error) or type(error).__name__


_KINDS = {kind.__name__: kind for kind in LaststepError.__subclasses__()}


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of a stored error and of its causes. Their frames keep buffers and files
    alive, and often the error itself, until the garbage collector runs."""
    chain, seen = [error], set[int]()
    while chain:
        link = chain.pop()
        if id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            chain += [cause for cause in (link.__cause__, link.__context__) if cause is not None]


def ends_tracebacks(call: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Decorate a public call: the traceback of an error that laststep raises deliberately ends
    there, since the message says all; those of its causes stay. All of it is logged at DEBUG."""

    @functools.wraps(call)
    def shortened(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            return call(*args, **kwargs)
        except LaststepError as error:
            raised = error
            log.debug("%s failed", call.__qualname__, exc_info=error)
        try:
            raise raised.with_traceback(None)
        finally:
            del raised  # else the frame, which the traceback holds, holds the error

    return shortened


def from_wire(kind: str, fields: dict[str, str | None]) -> LaststepError:
    """Return the error that `to_wire` described; an unknown kind becomes a plain LaststepError."""
    what = fields.get("what") or "an error without a description"
    parts = {name: fields.get(name) for name in _PARTS}
    error = _KINDS.get(kind, LaststepError)(what, **parts)
    if isinstance(error, StorageError):
        error.transient = "transient" in fields
        error.device_failed = "device_failed" in fields
    error.missing = fields.get("missing")
    return error
