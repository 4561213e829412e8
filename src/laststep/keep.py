"""Which checkpoints stay, as a user says it."""

from __future__ import annotations

from dataclasses import dataclass

from laststep.catalog.retention import Policy
from laststep.errors import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Retention: a checkpoint stays if any rule wants it; pinned ones, the newest good one and the
    one that the run was resumed from always do. Without any rule everything stays."""

    last: int | None = None
    """The last so many."""
    every: int | None = None
    """Those whose step is a multiple of this."""
    best: int | None = None
    """The best so many by `metric`."""
    metric: str | None = None
    mode: str = "min"
    """Whether the best metric is the smallest (`min`) or the largest (`max`)."""

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise Usage(
                    f"Keep({name}=…) is not a count", expected="1 or more", found=repr(value)
                )
        if (self.best is None) != (self.metric is None):
            raise Usage("Keep needs best and metric together", found=repr(self))
        if self.mode not in ("min", "max"):
            raise Usage("Keep(mode=…) is unknown", expected="'min' or 'max'", found=repr(self.mode))

    def policy(self) -> Policy:
        """The same for the catalog."""
        return Policy(
            keep_last=self.last, keep_every=self.every, keep_best=self.best,
            best_metric=self.metric, best_mode=self.mode,  # type: ignore[arg-type]
        )  # fmt: skip

    def bound(self) -> int | None:
        """How many are kept at most; None where that grows with the run."""
        if self.every is not None or (self.last is None and self.best is None):
            return None
        return (self.last or 0) + (self.best or 0) + 1
