"""The public object and what it is made of: saving, restoring, opening, one-off files."""
