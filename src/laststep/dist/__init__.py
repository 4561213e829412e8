"""How ranks agree. One rank for now: a larger job is refused rather than half saved."""
