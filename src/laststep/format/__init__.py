"""The on-disk formats of docs/format.md (layouts, index, manifest), as pure functions from values
to bytes."""
