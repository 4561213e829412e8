"""The ranks of a job commit a save together: each reports, and the first one decides."""
