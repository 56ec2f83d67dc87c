"""Executes a plan: an unmodified model, in its own training loop, runs by the schedule that was simulated.

The entry is :func:`executor.prepare.prepare_session`. No more is imported here, so that :mod:`executor.optimizer` can
be used without torch.
"""

from hwprofiles.installation import check_versions

check_versions(("numba", "numpy", "torch", "transformers"))
