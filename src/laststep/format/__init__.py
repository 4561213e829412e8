"""The container and the manifest of docs/format.md, as pure functions from values to bytes."""
