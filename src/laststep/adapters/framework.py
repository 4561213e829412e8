"""Shared by all framework adapters: tested versions, and the stamp that marks a run as theirs.

On import, an adapter checks that its framework is installed in a supported version. It overrides
methods of the framework only after comparing their signatures with the expected ones. It stamps its
checkpoints, so that no framework resumes the run of another.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from laststep.errors import CorruptError, MismatchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from laststep.checkpointer import Checkpointer
    from laststep.restoring.restore import Peeked, Restored

log = logging.getLogger(__name__)

T = TypeVar("T")

_STAMP = "framework"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework and the versions that its adapter supports."""

    package: str
    """The framework's name for pip."""
    extra: str
    """The extra of laststep that installs it."""
    first: str
    last: str
    """The first and the last version that the adapter was tested with."""

    @property
    def version(self) -> str:
        """The installed version. Raises UsageError if the framework is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            raise UsageError(
                f"{self.package} is not installed",
                expected=self._tested(),
                remedy=f"pip install 'laststep[{self.extra}]'",
            ) from None

    def check(self) -> None:
        """Raise UsageError if the framework is too old. Log a warning if it is newer than all
        tested versions; its signatures are still checked."""
        installed = _numbers(self.version)
        if installed < _numbers(self.first):
            raise UsageError(
                f"this version of {self.package} is too old",
                expected=self._tested(),
                found=self.version,
                remedy=f"pip install 'laststep[{self.extra}]'",
            )
        last = _numbers(self.last)
        if installed[: len(last)] > last:
            log.warning("%s %s is newer than %s", self.package, self.version, self._tested())

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
        raise UsageError(
            f"{owner.__name__}.{method} of {self.package} {self.version} has an unknown signature",
            expected=f"{method}({', '.join(parameters)}), as in {self._tested()}",
            found=found,
            remedy=f"pip install 'laststep[{self.extra}]'",
        )

    def stamp(self, **more: object) -> dict[str, object]:
        """Return the metadata of a save: framework, version, and the adapter's own values."""
        return {_STAMP: self.package, "version": self.version, **more}

    def own(self, metadata: object, where: str) -> dict[str, object]:
        """Return the metadata of a checkpoint if `stamp` made it; raise MismatchError if it is not
        ours."""
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
        """Call `restore` with the newest checkpoint and its stamp. If that checkpoint is damaged,
        log a warning and try the one before it.

        Returns None in a new run; raises CorruptError if all checkpoints are damaged.
        """
        found = ckpt.peek()
        while found is not None:
            stamp = self.own(found.metadata, f"{ckpt.path}, step {found.step}")
            try:
                return restore(found, stamp)
            except CorruptError as damage:
                older = ckpt.peek()
                if older is None or older.folder == found.folder:
                    raise  # the damage is not in this checkpoint
                log.warning(
                    "step %d is damaged, trying step %d: %s", found.step, older.step, damage
                )
                found = older
        return None

    def _tested(self) -> str:
        span = self.first if self.first == self.last else f"{self.first} to {self.last}"
        return f"{self.package} {span}, with which laststep.{self.extra} was tested"


def first_sound(
    found: Sequence[tuple[int, T]], restore: Callable[[int, T], Restored]
) -> Restored | None:
    """Restore the first undamaged one of these steps, which are newest first. Return None if there
    are none; raise CorruptError if all are damaged."""
    for (step, about), older in itertools.zip_longest(found, found[1:]):
        try:
            return restore(step, about)
        except CorruptError as damage:
            if older is None:
                raise
            log.warning("step %d is damaged, trying step %d: %s", step, older[0], damage)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
