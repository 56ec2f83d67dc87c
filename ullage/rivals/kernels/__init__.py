"""Graphs of other implementations of a model, where their kernels differ from those of ``transformers``."""

import dataclasses

from planner.models.kernels import Work
from planner.models.operators import Operator


def work_of(operator: Operator) -> Work:
    """Return the work of an operator."""
    return Work(operator.forward, operator.backward, operator.saved_bytes, operator.workspace_bytes)


def with_work(operator: Operator, work: Work) -> Operator:
    """Return an operator that does other work."""
    return dataclasses.replace(
        operator,
        forward=work.forward,
        backward=work.backward,
        saved_bytes=work.saved_bytes,
        workspace_bytes=work.workspace_bytes,
    )
