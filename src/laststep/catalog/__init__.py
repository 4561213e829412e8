"""The catalog of a run: its checkpoints, its writers, commits and retention.

`run` is the entry point and the writer. `attempt` writes one checkpoint and decides about it;
`terms` and `instances` order the writers; `listing` and `indexes` read; `retention` decides purely
before it deletes anything. Nothing here knows the content of a data file.
"""
