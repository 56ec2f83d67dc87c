"""Degrees of parallelism and batch sizes, which are chosen before placement, and the space of placements for each."""
