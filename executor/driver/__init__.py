"""Follows the model through an iteration: as planned, or on demand where it leaves the plan."""
