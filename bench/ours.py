"""laststep as a peer: the only module of the benchmark that knows its interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.peers import Peer

if TYPE_CHECKING:
    from pathlib import Path

    import laststep
    from bench.state import Training


class Laststep(Peer):
    """laststep, in one of its ways of capturing. Durable means committed: visible to `restore`."""

    needs = ("laststep",)
    saves = 2

    def __init__(self, capture: str = "auto", host_memory_bytes: int | None = None) -> None:
        self.name = "laststep" if capture == "auto" else f"laststep {capture}"
        self._capture = capture
        self._host_memory_bytes = host_memory_bytes
        self._checkpointer: laststep.Checkpointer | None = None
        self._handle: laststep.SaveHandle | None = None

    def missing(self) -> str | None:
        reason = super().missing()
        if reason is not None:
            return reason
        import laststep

        # A checkout without the package's __init__ still imports, as an empty namespace.
        return None if hasattr(laststep, "Checkpointer") else "not installed (no Checkpointer)"

    def open(self, training: Training, folder: Path) -> None:
        import laststep

        self._checkpointer = laststep.Checkpointer(
            folder,
            items=training.items(),
            options=laststep.Options(capture=self._capture, progress=False),
            host_memory_bytes=self._host_memory_bytes,
        )

    def save(self, training: Training, path: Path) -> None:
        self._handle = self._live().save(int(path.name.rpartition("-")[2]))

    def waited_s(self) -> float:
        """How long the last `save` waited for memory that an earlier one held."""
        return float(self._last().report.waited_s)

    def wait_durable(self) -> None:
        self._last().committed.wait()

    def load(self, path: Path, into: Training) -> None:
        """As after a restart: a new Checkpointer, whose construction counts."""
        self.open(into, path.parent)
        self._live().restore()

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _live(self) -> laststep.Checkpointer:
        if self._checkpointer is None:
            raise RuntimeError("save and restore come between open and close")
        return self._checkpointer

    def _last(self) -> laststep.SaveHandle:
        if self._handle is None:
            raise RuntimeError("nothing has been saved yet")
        return self._handle
