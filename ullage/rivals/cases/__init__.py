"""Published runs as cases: their measurements, and schedules that predict them.

Each kind of case is a module with a class that knows the measurements of its runs, checks whether they can be
expressed, and predicts them. A case that cannot be expressed is refused by name and never skipped: errors over the easy
cases alone would prove nothing.
"""

from ullage.rivals.cases.base import Case, CaseError, Metric, Outcome
from ullage.rivals.cases.files import load_cases, repeated_id

__all__ = ["Case", "CaseError", "Metric", "Outcome", "load_cases", "repeated_id"]
