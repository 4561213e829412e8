"""This rank's part in committing the saves of a job: one thread, save by save, beside training.

Every rank makes its files durable and reports; the first rank decides (`leading`), the others hear
of it (`following`). Whatever happens, the save is committed whole or absent, every rank that lives
hears in time, and why, and the handle of every save comes to an end here.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from laststep.checkpointer.following import Following
from laststep.checkpointer.leading import Leading
from laststep.checkpointer.rounds import Over, Round
from laststep.engine.wire import Decide
from laststep.errors import Aborted, LaststepError, StorageFailed

if TYPE_CHECKING:
    from laststep.checkpointer.parts import Taken
    from laststep.checkpointer.rounds import Desk
    from laststep.engine.client import SaveLink
    from laststep.engine.handle import SaveHandle
    from laststep.plan.groups import Groups
    from laststep.plan.job import Agreement
    from laststep.plan.save import SavePlan

log = logging.getLogger(__name__)

_REMEDY = "every rank must call save() for the same steps; the log of that rank says more"


class Team:
    """The ranks of a job, as this one sees them."""

    def __init__(self, desk: Desk, groups: Groups) -> None:
        self.rank = desk.rank
        self.agreements = desk.agreements
        self._desk = desk
        self._part = Leading(desk, groups) if desk.rank.is_first else Following(desk)
        self._rounds: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="laststep-commit", daemon=True)
        self._thread.start()

    def begin(
        self,
        handle: SaveHandle,
        plan: SavePlan,
        taken: Taken,
        agreement: Agreement,
        *,
        overwrite: bool,
    ) -> SaveLink:
        """Enter a save of all ranks; its chunks may follow."""
        one = Round(handle.step, None, plan, agreement)
        one.link = self._desk.client.begin(
            plan, handle, taken.sealing(plan, one.trees.update), overwrite=overwrite,
            role="first" if self.rank.is_first else "member",
        )  # fmt: skip
        self._rounds.put(one)
        return one.link

    def stay_out(self, step: int, why: str) -> None:
        """This rank does not take part in a save of that step; the others must hear it."""
        self._rounds.put(Round(step, None, None, None, problem=why))

    def close(self) -> None:
        """When all saves are over."""
        self._rounds.put(None)
        self._thread.join()
        self._desk.board.close()
        self.agreements.close()

    # -- on its thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while (one := self._rounds.get()) is not None:
            try:
                self._desk.settle(one, self._go(one))
            except BaseException as error:
                # Nobody else ends this save: whoever waits for it would wait for ever.
                log.exception("the commit of step %d failed", one.step)
                if one.link is not None:
                    one.link.failed(StorageFailed("a commit failed", found=repr(error)))

    def _go(self, one: Round) -> LaststepError | None:
        """Take part in a save; returns why it is given up, if it is."""
        mine = f"rank {self.rank.number}"
        one.began_s = time.monotonic()
        try:
            out = f", in which it takes no part: {one.problem}" if one.problem else ""
            self._desk.board.put(f"last/{self.rank.number}", f"step {one.step}{out}".encode())
            self._part.take_part(one)
        except Over as over:
            return self._give_up(one, Aborted(str(over), remedy=_REMEDY), str(over))
        except LaststepError as error:
            return self._give_up(one, error, f"{mine}: {error.without_remedy()}")
        except Exception as error:
            log.exception("the commit of step %d failed", one.step)
            failed = StorageFailed("a commit failed", found=repr(error))
            return self._give_up(one, failed, f"{mine}: {failed}")
        return None

    def _give_up(self, one: Round, error: LaststepError, reason: str) -> LaststepError:
        """Whoever can be told is told; the run itself says what stands."""
        with contextlib.suppress(LaststepError):
            self._part.warn(one, reason)
        link = one.link
        if link is None:
            return error
        if not link.handle.durable.done():
            link.failed(error)
            return error
        # Its flusher finds out whether it is committed after all.
        self._desk.client.send(Decide(save=link.number, reason=reason))
        self._desk.await_flusher(link)
        if isinstance(link.handle.error, Aborted):
            with contextlib.suppress(LaststepError):
                self._part.confirm(one, reason)
        return error
