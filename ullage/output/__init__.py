"""How results look: tables, JSON, numbers, colours and progress."""
