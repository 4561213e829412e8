"""Shared by all framework adapters: the tested versions, and the stamp that marks a run as theirs.

Adapters override private methods of their frameworks and read private attributes, so a newer
release than those tested is accepted only if it has not changed these. An adapter stamps its
checkpoints, so that no framework resumes the run of another.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laststep.adapters.sources import Uses, changed
from laststep.checkpointer import Checkpointer
from laststep.errors import CorruptError, MismatchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from laststep.restoring.restore import Peeked, Restored

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    package: str
    """The framework's name for pip."""
    extra: str
    """The extra of laststep that installs it."""
    oldest: str
    """The oldest release that the adapter is tested with, without its bug fixes: 2.6."""
    newest: str
    """The newest release that the adapter is tested with."""
    uses: Uses = field(default_factory=dict)
    """Digests, of the newest tested release, of the code that the adapter overrides, calls although
    it is private, or imitates. Without any, no newer release is accepted."""

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.package)

    @property
    def tested(self) -> str:
        return self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"

    def check(self) -> None:
        """Raise UsageError if the framework is not installed, is older than the oldest tested
        release, or is newer and has changed what the adapter uses. Warn of another newer one."""
        try:
            found = self.version
        except importlib.metadata.PackageNotFoundError:
            found = "none installed"
        if _minor(found) < _minor(self.oldest):
            raise self._refused(found, f"pip install 'laststep[{self.extra}]'")
        if _minor(found) <= _minor(self.newest):
            return
        changes = changed(self.uses)
        if changes or not self.uses:
            what = f"{found}, which changes {', '.join(changes)}" if changes else found
            raise self._refused(what, f"pip install '{self.package}=={self.newest}.*'")
        log.warning(
            "laststep.%s was tested with %s %s; %s is newer, but does not change what it uses",
            self.extra,
            self.package,
            self.tested,
            found,
        )

    def _refused(self, found: str, remedy: str) -> UsageError:
        return UsageError(
            f"laststep.{self.extra} does not support this version of {self.package}",
            expected=self.tested,
            found=found,
            remedy=remedy,
        )

    def stamp(self, **more: object) -> dict[str, object]:
        """Return the metadata of a save: framework, version, and the adapter's own values."""
        return {"framework": self.package, "version": self.version, **more}

    def own(self, metadata: object, where: str) -> dict[str, object]:
        """Return a checkpoint's metadata. Raise MismatchError if `stamp` did not make it."""
        stamped = metadata if isinstance(metadata, dict) else {}
        whose = stamped.get("framework")
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
        damage: CorruptError | None = None
        failed: Peeked | None = None
        # After a restore that found damage, `peek` returns the checkpoint before.
        while (found := ckpt.peek()) is not None and (
            failed is None or found.folder != failed.folder
        ):
            if failed is not None:
                log.warning(
                    "step %d is damaged, trying step %d: %s", failed.step, found.step, damage
                )
            stamp = self.own(found.metadata, f"{ckpt.path}, step {found.step}")
            try:
                return restore(found, stamp)
            except CorruptError as error:
                damage, failed = error, found
        if damage is not None:
            raise damage
        return None


def _minor(version: str) -> tuple[int, ...]:
    """Return the numbers of a release without its bug fixes; none if there are none."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


class FrameworkCheckpointer(Checkpointer):
    """For adapters whose items depend on how the framework trains this time: with or without a
    scheduler, a loader or DeepSpeed's own counts."""

    _may_lack_items = True


@contextlib.contextmanager
def advising(ckpt: Checkpointer) -> Iterator[None]:
    """Replace advice that a framework's user cannot follow, such as restore(strict=False)."""
    try:
        yield
    except MismatchError as error:
        remedy = (
            "build the same model and optimizer as in the run, or save to a new run; "
            f"laststep.load({ckpt.path!r}, into={{'model': model}}, strict=False) loads what fits"
        )
        raise error.amended(remedy=remedy) from error.__cause__
