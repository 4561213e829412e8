"""What others need to test their own stores and codecs, and what they build on ours.

`stores` is the suite that every store has to pass, `codecs` the checks of a codec of blocks,
`faults` a disk that fails or records.
"""
