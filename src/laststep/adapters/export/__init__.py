"""Write a checkpoint as other tools read it."""
