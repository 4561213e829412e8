"""Stores: the protocol that every store implements, and its implementations.

`store` is the protocol and `registry` opens stores by path or URL. `directory` is the store in a
local or network folder, with `files` for open files and system calls and `locks` for locks. Nothing
here knows about checkpoints.
"""
