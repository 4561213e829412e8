"""How the ranks of a job talk to each other."""
