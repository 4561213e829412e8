"""Copies between live tensors and host memory: the only part of the engine, with the pool, that
imports torch."""
