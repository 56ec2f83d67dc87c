"""What is decided before anything is placed: degrees of parallelism and batch sizes, and the space that is left."""
