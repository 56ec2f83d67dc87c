"""The optimizer step on the host: one pass over memory, on a team of threads, bf16 in and out.

Kernels work without torch. :mod:`executor.optimizer.table` joins them to optimizers.
"""
