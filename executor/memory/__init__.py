"""Holds all tensors: static memory, state and gradients of every parameter, activations, files on NVMe."""
