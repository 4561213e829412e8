"""What a run holds: its checkpoints, who may write, what commits, what is kept.

`run` is the way in. `names`, `lineage` and `retention` are pure; `epochs`, `decision`, `listing`,
`cleaning` and `prune` work on a store. Nothing here knows what is in a data file.
"""
