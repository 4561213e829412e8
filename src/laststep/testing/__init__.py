"""The test suite for third-party stores, and tools for code that builds on laststep.

`stores` is the suite that every store must pass, and `processes` finds the children of a process.
"""
