"""Checkpoints: engines as policies, their tasks in the schedule of a run, and what they cost."""
