"""The flusher, which writes captured saves from memory to the run: the trainer's side of it, and
the side that runs in a helper process without torch or on a thread of the trainer."""
