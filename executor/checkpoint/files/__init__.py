"""A file of a checkpoint: how it is opened, read and written past the page cache, wherever it is."""
