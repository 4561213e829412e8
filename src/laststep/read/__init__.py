"""Read stored data and verify every byte of it."""
