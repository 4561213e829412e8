"""The host memory that captures land in, shared with the flusher."""
