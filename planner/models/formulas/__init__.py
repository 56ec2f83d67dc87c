"""Formulas: the operators of the known model families, with kernels and bytes, from a model's sizes and a batch."""
