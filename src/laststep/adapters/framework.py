"""What all adapters of frameworks share: which versions they were tested with, and whose a run is.

An adapter asks, when it is imported, whether its framework is there in a version that it knows. It
overrides methods of the framework only after it has compared them with those that it was written
for. It stamps what it saves, so that no framework takes up the run of another.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laststep.errors import CorruptError, MismatchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from laststep.checkpointer import Checkpointer
    from laststep.restoring.restore import Peeked, Restored

log = logging.getLogger(__name__)

_STAMP = "framework"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework, as one adapter knows it."""

    package: str
    """As pip knows it."""
    extra: str
    """By which laststep installs it."""
    first: str
    last: str
    """The first and the last version that the adapter was tested with."""

    @property
    def version(self) -> str:
        """That is installed; `UsageError` where none is."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            raise UsageError(
                f"{self.package} is not installed",
                expected=self._tested(),
                remedy=f"pip install 'laststep[{self.extra}]'",
            ) from None

    def check(self) -> None:
        """`UsageError` where it is too old; the log tells of one that is newer than all that were
        tried, whose seams are compared all the same."""
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
        """`UsageError` where a method that the adapter overrides or calls is not there, or does not
        take these parameters, `self` left out, as its first ones."""
        function = inspect.getattr_static(owner, method, None)
        function = getattr(function, "__func__", function)
        found = "no such method"
        if callable(function):
            names = [name for name in inspect.signature(function).parameters if name != "self"]
            if names[: len(parameters)] == list(parameters):
                return
            found = f"{method}({', '.join(names)})"
        raise UsageError(
            f"{owner.__name__}.{method} of {self.package} {self.version} is not the one that this "
            "adapter knows",
            expected=f"{method}({', '.join(parameters)}), as in {self._tested()}",
            found=found,
            remedy=f"pip install 'laststep[{self.extra}]'",
        )

    def stamp(self, **more: object) -> dict[str, object]:
        """The metadata of a save: whose it is, and what else the adapter has to know."""
        return {_STAMP: self.package, "version": self.version, **more}

    def own(self, metadata: object, where: str) -> dict[str, object]:
        """The metadata of a checkpoint as `stamp` made it; `MismatchError` where it is not ours."""
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
        """Let `restore` restore the newest checkpoint, which it is given with its stamp; where that
        is damaged, the one before it, and the log says so. None in a new run; `CorruptError` in one
        of which nothing is sound."""
        found = ckpt.peek()
        while found is not None:
            stamp = self.own(found.metadata, f"{ckpt.path}, step {found.step}")
            try:
                return restore(found, stamp)
            except CorruptError as damage:
                older = ckpt.peek()
                if older is None or older.folder == found.folder:
                    raise  # something else was damaged
                log.warning(
                    "step %d is damaged, step %d is tried: %s", found.step, older.step, damage
                )
                found = older
        return None

    def _tested(self) -> str:
        span = self.first if self.first == self.last else f"{self.first} to {self.last}"
        return f"{self.package} {span}, with which laststep.{self.extra} was tested"


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
