"""Every error laststep raises on purpose, grouped by what the caller can do about it.

Knows nothing of the rest of the library. A message always reads: what failed, where, what was
expected, what was found, and what to do next. Errors cross from the flusher process to the trainer
as `(kind, fields)` through `to_wire` and `from_wire`; they never travel as pickles.
"""

from __future__ import annotations

import copy
import re
from typing import Self

import msgspec

_SHOWN_PROBLEMS = 50


class LaststepError(Exception):
    """The root of the tree; catch it to catch everything that laststep raises on purpose."""

    usual_remedy: str | None = None
    """What helps where nothing better is known."""
    missing: str | None = None
    """The file that is not there, by its name within its store, where that is what was found."""
    step: int | None = None
    """The step of the save that failed of it, where that is what failed."""

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
        super().__init__(self._message())

    def without_remedy(self) -> str:
        """The message for where the remedy is of no use, such as where it is being done; whose
        save failed of it is known there too."""
        return self._message(with_remedy=False)

    def of_save(self, step: int) -> Self:
        """The same error as that save's own, which names its step: others may have failed of it."""
        mine = copy.copy(self)
        mine.__cause__, mine.step = self.__cause__, step
        text = str(self.args[0])
        named = re.search(rf"\bstep {step}\b", text)
        mine.args = (text if named else f"the save of step {step} failed: {text}",)
        return mine

    def lacking(self, name: str) -> Self:
        """The same error, which says what file is not there."""
        self.missing = name
        return self

    def _message(self, *, with_remedy: bool = True) -> str:
        text = self.what
        if self.where is not None:
            text += f" at {self.where}"
        if self.expected is not None:
            text += f": expected {self.expected}"
        if self.found is not None:
            text += (", " if self.expected is not None else ": ") + f"found {self.found}"
        if self.remedy is not None and with_remedy:
            text += f"; {self.remedy}"
        return text

    def to_wire(self) -> tuple[str, dict[str, str | None]]:
        """The error as plain values that another process can turn back into the same error."""
        names = ("what", "where", "expected", "found", "remedy")
        fields: dict[str, str | None] = {name: getattr(self, name) for name in names}
        for flag in ("transient", "device_failed"):
            if getattr(self, flag, False):
                fields[flag] = "yes"
        if self.missing is not None:
            fields["missing"] = self.missing
        return type(self).__name__, fields


class NotFoundError(LaststepError):
    """There is nothing there: no run, no checkpoint of that step, no such piece."""

    usual_remedy = "check the name; `laststep ls` and `laststep show --all` list what there is"


class AlreadyExistsError(LaststepError):
    """The name is taken: that step of this lineage, or that path, has been committed already."""

    usual_remedy = "use another name, or remove what is there"


class CorruptError(LaststepError):
    """Stored bytes are not what was written; an older checkpoint may still be good."""

    usual_remedy = "`laststep verify` lists damaged bytes; restore an older step, or from a copy"


class Problems(msgspec.Struct, frozen=True, kw_only=True):
    """What did not fit between a checkpoint and the live state; empty, and false, when all is well.

    `MismatchError.problems` and, with strict=False, `Restored.problems` are one of these.
    """

    missing: tuple[str, ...] = ()
    """Live, but not stored: full names, `item` or `item/name`."""
    unexpected: tuple[str, ...] = ()
    """Stored, but not live: full names likewise."""
    mismatched: tuple[str, ...] = ()
    """In both, but different in shape, dtype, class or structure: one text for each."""

    def __bool__(self) -> bool:
        return len(self) > 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self.missing) + len(self.unexpected) + len(self.mismatched)

    def lines(self) -> tuple[str, ...]:
        """All of it as text, one line for each."""
        return (
            *(f"missing: {name} is not in the checkpoint" for name in self.missing),
            *(f"unexpected: {name} is not in the live state" for name in self.unexpected),
            *(f"mismatched: {text}" for text in self.mismatched),
        )


class MismatchError(LaststepError):
    """The checkpoint is sound but does not fit the live state; see `.problems` for all of it."""

    problems: Problems = Problems()
    """Everything that does not fit; the message lists the first fifty."""

    @classmethod
    def of(
        cls,
        problems: Problems,
        *,
        where: str,
        remedy: str,
        what: str = "the checkpoint does not fit the live state",
    ) -> MismatchError:
        """The error for these problems, of a checkpoint `where`."""
        count = len(problems)
        places = "1 place" if count == 1 else f"{count} places"
        error = cls(f"{what} in {places}", where=where, remedy=remedy)
        error.problems = problems
        return error

    def __str__(self) -> str:
        return super().__str__() + self._lines()

    def without_remedy(self) -> str:
        """The same, with what does not fit."""
        return super().without_remedy() + self._lines()

    def _lines(self) -> str:
        lines = [f"\n  {line}" for line in self.problems.lines()[:_SHOWN_PROBLEMS]]
        if len(self.problems) > _SHOWN_PROBLEMS:
            lines.append(f"\n  … and {len(self.problems) - _SHOWN_PROBLEMS} more (see .problems)")
        return (":" if lines else "") + "".join(lines)


class StorageError(LaststepError):
    """The store could not be read or written; `transient` says that trying again may help."""

    usual_remedy = "the log says more; look at the disk and at `dmesg`, and try again"
    transient: bool = False
    device_failed: bool = False
    """Whether a device could not read back what is stored on it. Only that is damage: an error of
    access or of the network says nothing about the stored bytes."""


class AbortedError(LaststepError):
    """The save was given up, here or by another writer, and nothing of it was committed."""

    usual_remedy = "the next save tries again"


class TornCaptureError(LaststepError):
    """The state changed while it was captured; nothing of that save was committed."""

    usual_remedy = "the next save tries again"


class UsageError(LaststepError):
    """The call cannot work as it was made, and will not work when repeated unchanged."""

    usual_remedy = "pass what is expected; docs/guides/api.md has all arguments"


def brief(error: BaseException) -> str:
    """What any error says, for others to read; what to do is for whoever gets it raised."""
    if isinstance(error, LaststepError):
        return error.without_remedy()
    return str(error) or type(error).__name__


_KINDS: dict[str, type[LaststepError]] = {
    kind.__name__: kind
    for kind in (
        NotFoundError,
        AlreadyExistsError,
        CorruptError,
        MismatchError,
        StorageError,
        AbortedError,
        TornCaptureError,
        UsageError,
        LaststepError,
    )
}


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error that is kept, and of its causes. Their frames keep buffers
    and files open, and often the error itself, until the garbage collector runs."""
    chain, seen = [error], set[int]()
    while chain:
        link = chain.pop()
        if id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            chain += [cause for cause in (link.__cause__, link.__context__) if cause is not None]


def from_wire(kind: str, fields: dict[str, str | None]) -> LaststepError:
    """The error that `to_wire` described; an unknown kind becomes a plain LaststepError."""
    what = fields.get("what") or "an error without a description"
    error = _KINDS.get(kind, LaststepError)(
        what,
        where=fields.get("where"),
        expected=fields.get("expected"),
        found=fields.get("found"),
        remedy=fields.get("remedy"),
    )
    if isinstance(error, StorageError):
        error.transient = fields.get("transient") == "yes"
        error.device_failed = fields.get("device_failed") == "yes"
    error.missing = fields.get("missing")
    return error
