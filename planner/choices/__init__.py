"""A request, the degrees of parallelism and batch sizes that it leaves open, and a variant for each choice of them."""
