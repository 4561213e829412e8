"""The host memory that captures are copied into, shared with the flusher."""
