"""Executes a plan: an unmodified model, in its own training loop, runs by the schedule that was simulated.

The entry is :func:`executor.prepare.prepare_session`. Nothing is imported here, so that :mod:`executor.optimizer` can
be used without torch.
"""
