"""Published runs as cases: their measurements, and schedules that predict them.

A case knows what was measured of its run, checks whether it can be expressed, and predicts it: training
(:mod:`ullage.rivals.cases.training`) or checkpoints (:mod:`ullage.rivals.cases.checkpoints`). A case that cannot be
expressed is refused by name and never skipped: errors over the easy cases alone would prove nothing. Only of a
collection (:mod:`ullage.rivals.cases.collected`) is it left out, with its reason.
"""

from ullage.rivals.cases.base import Case, CaseError, Metric, Outcome
from ullage.rivals.cases.files import load_cases, read_file, repeated_id
from ullage.rivals.cases.layouts import read_case

__all__ = ["Case", "CaseError", "Metric", "Outcome", "load_cases", "read_case", "read_file", "repeated_id"]
