"""The benchmark: laststep and its peers on one machine, against that machine's limits."""
