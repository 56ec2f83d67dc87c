"""What ranks do together: collectives, sharding, tensor and expert parallelism, and noticing that one failed."""
