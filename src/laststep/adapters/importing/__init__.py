"""Read checkpoints of other tools into plain nested state, without running their code."""
