"""``prepare`` and ``Trainer``: training under a plan, its data, checkpoints, drift and record."""
