"""The catalog of a run: its checkpoints, its writers, commits and retention.

`run` is the entry point. `lineage` is pure, and `retention` decides purely before it deletes
anything; `terms`, `decision`, `attempt`, `listing` and `cleaning` work on a store. Nothing here
knows the content of a data file.
"""
