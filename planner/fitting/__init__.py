"""Fit profiles to runs, and explain why a run took another time than predicted."""
