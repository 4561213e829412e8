"""The on-disk formats of docs/format.md: layouts, index and manifest, as pure functions."""
