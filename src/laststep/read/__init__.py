"""Read what is stored, and verify every byte of it."""
