"""Checkpoints: files with a precomputed layout, written with direct I/O, and valid only when they are durable."""
