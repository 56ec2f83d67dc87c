"""Training under a plan: ``prepare``, ``Trainer``, data, checkpoints and drift."""
