"""Ends the audit of an iteration on all ranks, before its step."""

import functools

import torch

from executor.audit.audit import Audit, AuditError
from executor.audit.cases import stored_gradients
from executor.driver.runtime import Runtime


def end_audit(audit: Audit, runtime: Runtime) -> None:
    """End the audit of this iteration on all ranks.

    Raises:
        AuditError: on some rank, the plan and plain PyTorch differ.
    """
    iteration = runtime.loop.iteration
    if not runtime.actions.defers:
        runtime.actions.defer_updates(iteration, runtime.loop.num_issued)
    runtime.issue_gradients()
    runtime.synchronize()
    if iteration:  # the first one is left out of comparisons anyway
        runtime.machine.exclude(iteration)
    stored = functools.partial(stored_gradients, runtime.state, iteration)
    runtime.enter(f"the audit of iteration {iteration + 1}")
    difference = audit.end_iteration(runtime.backend.device, stored, functools.partial(_summed, runtime))
    if runtime.of_stage.any(bool(difference)):
        what = difference or "another rank has found a difference"
        raise AuditError(
            f"audit of iteration {iteration + 1}: {what}; no weight has changed since the last step; audit='off' "
            "trains without this check"
        )


def _summed(runtime: Runtime, values: torch.Tensor) -> torch.Tensor:
    assert runtime.ranks is not None
    experts = runtime.ranks.experts
    return experts.all_gather_on_host(values.reshape(-1)).view(experts.size, *values.shape).sum(0)
