"""What changes a run: a flusher for each trainer, in a process of its own without torch, or on a
thread."""
