"""All that training needs to go on: saved in checkpoints, and restored."""
