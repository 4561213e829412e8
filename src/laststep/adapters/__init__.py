"""Checkpoints of other kinds: read into plain nested state, or written.

What is read is only data: no module here runs any code that it finds.
"""
