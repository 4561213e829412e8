"""Test suites and tools for third-party stores and codecs, and for code that builds on laststep.

`stores` is the suite that every store must pass, `codecs` has the checks of a block codec, `faults`
has disks that fail or record, and `processes` finds the children of a process.
"""
