"""Moves bytes: from devices into shared memory, from there to a store, and all the way back."""
