"""Which parts of a captured model can be computed in tiles of tokens."""
