"""One checkpoint in several places: how it gets from one store to another."""
