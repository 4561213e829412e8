"""Commit a save across the ranks of a job: every rank reports, rank 0 decides."""
