"""Write a checkpoint in the formats of other tools."""
