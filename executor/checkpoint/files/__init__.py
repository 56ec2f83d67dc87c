"""Opens, reads and writes a checkpoint's files past the page cache, in folders and at URLs."""
