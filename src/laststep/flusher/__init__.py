"""What changes a run: a flusher for each trainer, in a process of its own without torch, or on a
thread."""

from laststep.flusher.starting import Helper, start_process, start_thread

__all__ = ["Helper", "start_process", "start_thread"]
