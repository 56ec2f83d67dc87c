"""This machine: its profile, measured with the kernels of training, and plans for the memory that is free."""
