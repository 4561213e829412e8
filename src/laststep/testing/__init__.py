"""Test suites for third-party stores and codecs, and tools for code that builds on laststep.

`stores` is the suite that every store must pass, `codecs` has the checks of a block codec, and
`processes` finds the children of a process.
"""
