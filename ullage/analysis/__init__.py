"""Iterations, explanations and comparisons as data, which screens, reports and figures show."""
