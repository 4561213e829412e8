"""Turn the live state of a training job into a save plan, and decide when to save."""
