"""From a committed checkpoint to the live state: choose it, fit it, read it, hand it over."""
