"""Shared by all framework adapters: tested versions, and the stamp that marks a run as theirs.

On import, an adapter checks that its framework is installed in a supported version. It overrides
methods of the framework only after comparing their signatures with the expected ones. It stamps its
checkpoints, so that no framework resumes the run of another.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from laststep.errors import CorruptError, MismatchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

    from laststep.checkpointer import Checkpointer
    from laststep.restoring.restore import Peeked, Restored

log = logging.getLogger(__name__)


class Candidate(Protocol):
    """A checkpoint that may be restored."""

    @property
    def step(self) -> int: ...


C = TypeVar("C", bound=Candidate)

_STAMP = "framework"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework, by its name for pip, the extra of laststep that installs it, and the version
    that its adapter was tested with."""

    package: str
    extra: str
    tested: str

    @property
    def version(self) -> str:
        """The installed version; "" if the framework is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def check(self) -> None:
        """Raise UsageError if the framework is missing or too old. Log a warning if it is newer
        than the tested version; its signatures are still checked."""
        installed, tested = _numbers(self.version), _numbers(self.tested)
        if installed < tested:
            raise self._unfit(f"{self.package} is not installed or too old", self.version or "none")
        if installed[: len(tested)] > tested:
            log.warning("%s %s is newer than %s", self.package, self.version, self._expected())

    def seam(self, owner: type | ModuleType, method: str, *parameters: str) -> None:
        """Raise UsageError if a method that the adapter overrides or calls is missing, or if its
        first parameters after `self` are not these."""
        function = inspect.getattr_static(owner, method, None)
        function = getattr(function, "__func__", function)
        found = "no such method"
        if callable(function):
            names = [name for name in inspect.signature(function).parameters if name != "self"]
            if names[: len(parameters)] == list(parameters):
                return
            found = f"{method}({', '.join(names)})"
        what = f"{owner.__name__}.{method} of {self.package} {self.version} is unknown"
        raise self._unfit(what, f"{found} instead of {method}({', '.join(parameters)})")

    def stamp(self, **more: object) -> dict[str, object]:
        """Return the metadata of a save: framework, version, and the adapter's own values."""
        return {_STAMP: self.package, "version": self.version, **more}

    def own(self, metadata: object, where: str) -> dict[str, object]:
        """Return a checkpoint's metadata. Raise MismatchError if `stamp` did not make it."""
        stamped = metadata if isinstance(metadata, dict) else {}
        whose = stamped.get(_STAMP)
        if whose == self.package:
            return stamped
        raise MismatchError(
            f"this checkpoint was not saved by {self.package}",
            where=where,
            expected=f"one that laststep.{self.extra} has saved",
            found="one of a loop of its own" if whose is None else f"one of {whose}",
            remedy="choose another folder for this run; `laststep.load` reads single items",
        )

    def resume(
        self, ckpt: Checkpointer, restore: Callable[[Peeked, dict[str, object]], Restored]
    ) -> Restored | None:
        """Call `restore` with the newest undamaged checkpoint and its stamp. Return None in a new
        run; raise CorruptError if all checkpoints are damaged."""
        return first_sound(
            _newest_first(ckpt),
            lambda found: restore(
                found, self.own(found.metadata, f"{ckpt.path}, step {found.step}")
            ),
        )

    def _unfit(self, what: str, found: str) -> UsageError:
        remedy = f"pip install 'laststep[{self.extra}]'"
        return UsageError(what, expected=self._expected(), found=found, remedy=remedy)

    def _expected(self) -> str:
        return f"{self.package} {self.tested}, with which laststep.{self.extra} was tested"


def _newest_first(ckpt: Checkpointer) -> Iterator[Peeked]:
    """Yield what `peek` finds: an older checkpoint once a restore has found damage."""
    folder = None
    while (found := ckpt.peek()) is not None and found.folder != folder:
        folder = found.folder
        yield found


def first_sound(candidates: Iterable[C], restore: Callable[[C], Restored]) -> Restored | None:
    """Restore the first undamaged checkpoint. Raise CorruptError if there are only damaged ones."""
    damage: CorruptError | None = None
    step = -1
    for candidate in candidates:
        if damage is not None:
            log.warning("step %d is damaged, trying step %d: %s", step, candidate.step, damage)
        try:
            return restore(candidate)
        except CorruptError as error:
            damage, step = error, candidate.step
    if damage is not None:
        raise damage
    return None


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
