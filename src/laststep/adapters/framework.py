"""Shared by all framework adapters: the tested version, and the stamp that marks a run as theirs.

Adapters override private methods of their frameworks and read private attributes, so each accepts
only the release that it was tested with. It stamps its checkpoints, so that no framework resumes
the run of another.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    tested: str
    """The release that the adapter was tested with, without the number of its bug fixes: 2.6."""

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.package)

    def check(self) -> None:
        """Raise UsageError if the framework is not installed or is another release."""
        try:
            found = self.version
        except importlib.metadata.PackageNotFoundError:
            found = "none installed"
        if not f"{found}.".startswith(f"{self.tested}."):
            raise UsageError(
                f"laststep.{self.extra} does not support this version of {self.package}",
                expected=self.tested,
                found=found,
                remedy=f"pip install 'laststep[{self.extra}]'",
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
