"""Places for checkpoints: folders and URLs, and retention of the checkpoints there."""
