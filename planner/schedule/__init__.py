"""The schedule of one iteration: its tasks, the loop that walks it, and timelines of what happened."""
