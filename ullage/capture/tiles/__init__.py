"""Find the parts of a captured model that can be computed in tiles of tokens."""
