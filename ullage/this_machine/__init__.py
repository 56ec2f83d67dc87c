"""This machine: its profile, measured with the kernels that training runs, and plans for what is free on it."""
