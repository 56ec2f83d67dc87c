"""Several ranks: collectives, sharding, tensor and expert parallelism, and detection of failed ranks."""
