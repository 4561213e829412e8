"""Checkpoints of other tools and formats: read into plain nested state, or written.

Input is treated as data only: no module here runs code that it finds in a checkpoint.
"""
