"""From the state of a training to a plan: what it holds, and which files are to hold that."""
