"""Output: tables, JSON, numbers, colours and progress."""
