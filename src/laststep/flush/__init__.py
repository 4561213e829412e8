"""From memory to the run: both ends of the flusher, a process of its own without torch, or a
thread of the trainer.
"""
