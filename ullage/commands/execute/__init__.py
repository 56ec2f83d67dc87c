"""``ullage execute``."""
