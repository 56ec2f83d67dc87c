"""Audits: what a plan computes is compared with plain PyTorch; see [Note: Audit] in :mod:`executor.audit.audit`."""
