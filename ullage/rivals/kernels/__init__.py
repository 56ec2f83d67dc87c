"""Operators of other implementations of a model, where their kernels differ from those of ``transformers``."""
