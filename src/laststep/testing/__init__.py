"""What others need to test their own stores and what they build on ours.

`stores` is the suite that every store has to pass, `faults` a disk that fails or records.
"""
