"""The flusher, which writes captured saves from memory to the run, and the trainer's side of it."""
