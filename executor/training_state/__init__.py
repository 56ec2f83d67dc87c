"""Saves everything that training needs to continue in checkpoints, and restores it."""
