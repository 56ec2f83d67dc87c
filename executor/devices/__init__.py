"""What runs tasks: one thread or CUDA stream per lane, on cores of its own."""
