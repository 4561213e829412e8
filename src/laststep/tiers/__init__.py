"""Tiers: the same checkpoint in several stores, and how it is copied between them."""
