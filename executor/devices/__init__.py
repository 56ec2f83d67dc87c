"""Runs tasks: one thread or CUDA stream per lane, on the rank's own cores."""
