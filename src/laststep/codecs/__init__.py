"""Convert values to bytes and back: digests, strict JSON and typed JSON. Knows nothing of files."""
