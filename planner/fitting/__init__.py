"""Profiles fitted to runs, and why a run did not take what was predicted."""
