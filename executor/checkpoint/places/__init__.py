"""Where checkpoints are: folders and URLs, what is kept there, and the lock of the run that writes."""
