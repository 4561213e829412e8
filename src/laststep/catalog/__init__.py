"""The catalog of a run: its checkpoints, writers, commits and retention. `run` is the way in."""
