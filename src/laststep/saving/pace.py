"""How fast training goes, and what saves cost it: measured where `step()` is called.

Belongs to the training thread of the first rank; times come from outside. An iteration lies between
two calls. Those in which a save was under way are compared, by their medians, with the last before
it in which none was: a validation now and then does not count, nor do steps that become longer. The
first iterations of a start are not typical, and are left out.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from laststep.plan.frequency import mid

if TYPE_CHECKING:
    from laststep.flush.handle import SaveHandle

WARM_UP = 3
"""So many iterations of a start are left out: kernels are compiled and chosen, buffers made."""
BASELINE = 8
"""So many undisturbed iterations are seen before the first save, if that does not take long."""
_RECENT, _SAVES = 16, 5


class _Beside(NamedTuple):
    """The iterations in which a save was under way."""

    number: int
    usual_s: float | None
    """What those just before it took; None where none were seen."""
    seconds: list[float]

    @property
    def lost_s(self) -> float:
        """What they took longer, all together; by chance that may be less than nothing."""
        if self.usual_s is None:
            return 0.0
        return (mid(self.seconds) - self.usual_s) * len(self.seconds)


class _Ended(NamedTuple):
    """What one save took."""

    stall_s: float
    device_s: float
    slower_s: float
    latency_s: float
    size_bytes: int
    bytes_per_s: float


class Pace:
    """What was seen so far; also of saves that a user asked for himself."""

    def __init__(self) -> None:
        self._alone: deque[float] = deque(maxlen=_RECENT)
        """Seconds of the last iterations without a save."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """Of the last of all."""
        self._ended: deque[_Ended] = deque(maxlen=_SAVES)
        self._under_way: dict[SaveHandle, _Beside] = {}
        self._fresh: deque[SaveHandle] = deque(maxlen=_SAVES)
        """The last saves of this iteration."""
        self._seen = 0
        self._last_s: float | None = None
        self._saves = 0
        self.captured_s: float | None = None
        """When the last save began."""
        self.failed = False
        """Whether that came to nothing."""

    def anew(self) -> None:
        """A restore came between: what iterations take is seen anew, what saves cost is known."""
        self._last_s, self._seen = None, 0
        self._alone.clear()
        self._recent.clear()

    def iterated(self, now_s: float) -> None:
        """An iteration is over, and the next begins."""
        if self._last_s is not None:
            self._seen += 1
            # What saves held up is told by themselves.
            held_s = sum(handle.report.stall_s for handle in self._fresh)
            seconds = max(now_s - self._last_s - held_s, 0.0)
            self._recent.append(seconds)
            for beside in self._under_way.values():
                beside.seconds.append(seconds)
            if self._seen > WARM_UP and not self._under_way:
                self._alone.append(seconds)
        self._last_s = now_s
        self._fresh.clear()
        if self._under_way:
            self._look()

    def began(self, handle: SaveHandle, now_s: float) -> None:
        """A save begins."""
        self._look()  # where nobody calls step(), nobody else does
        self._saves += 1
        usual_s = mid(self._alone) if self._alone else None
        self._under_way[handle] = _Beside(self._saves, usual_s, [])
        self._fresh.append(handle)
        self.captured_s, self.failed = now_s, False

    def _look(self) -> None:
        """See which saves are over."""
        for handle in list(self._under_way):
            if not handle.done():
                continue
            beside, report = self._under_way.pop(handle), handle.report
            if report.committed_s is None:
                self.failed = self.failed or beside.number == self._saves
                continue
            moved = (report.written_bytes or 0) / max(report.durable_s or 0.0, 1e-9)
            self._ended.append(
                _Ended(
                    report.stall_s, report.device_copy_s + report.fence_s, beside.lost_s,
                    report.committed_s, report.size_bytes, moved,
                )
            )  # fmt: skip

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return bool(self._under_way)

    @property
    def missing(self) -> int:
        """How many undisturbed iterations are still to be seen before the first save."""
        return max(WARM_UP + BASELINE - self._seen, 0)

    @property
    def step_s(self) -> float | None:
        """What an iteration takes now; None while that is not known."""
        return mid(self._recent) if self._recent else None

    @property
    def cost_s(self) -> float | None:
        """What a save costs training: what it held up, and the longer of what the device did for it
        and what the iterations beside it took longer, which may be the same. None before the first
        has ended."""
        if not self._ended:
            return None
        slower_s = mid([one.slower_s for one in self._ended])
        device_s = mid([one.device_s for one in self._ended])
        return mid([one.stall_s for one in self._ended]) + max(device_s, slower_s)

    @property
    def latency_s(self) -> float:
        """How long a save takes until it is committed."""
        return mid([one.latency_s for one in self._ended])

    @property
    def size_bytes(self) -> int:
        return self._ended[-1].size_bytes if self._ended else 0

    @property
    def bytes_per_s(self) -> float:
        """What a save writes in a second, until it is durable."""
        return mid([one.bytes_per_s for one in self._ended])
