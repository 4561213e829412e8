"""Decide who writes and reads what: pure functions, without disk or torch."""
