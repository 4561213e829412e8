"""Communication between the ranks of a job."""
