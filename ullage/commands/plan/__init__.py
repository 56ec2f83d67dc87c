"""``ullage plan``."""
