"""What a machine can do: schema, built-in data, calibration. Imports nothing else of ours."""

__version__ = "0.1.0"
"""Of the whole distribution: this is the one package that all others may import."""
