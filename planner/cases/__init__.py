"""Published runs as cases: what was measured, and the schedule that stands for it.

Each kind of case is a module of its own with a class that knows what its runs measured, whether they can be expressed
here, and how to predict them. What cannot be expressed is refused by name, never left out: a summary of errors over
the cases that happen to be easy would say nothing.
"""

from planner.cases.base import Case, CaseError, Metric, Outcome
from planner.cases.files import load_cases, repeated_id

__all__ = ["Case", "CaseError", "Metric", "Outcome", "load_cases", "repeated_id"]
