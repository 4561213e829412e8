"""Restore a committed checkpoint into the live state: choose, match, read and hand over."""
