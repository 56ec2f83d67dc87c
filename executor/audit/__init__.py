"""Audits: what a plan computes is compared with plain PyTorch; see [Note: Audit] in :mod:`executor.audit.audit`."""

from executor.audit.audit import Audit, Audited, AuditError

__all__ = ["Audit", "AuditError", "Audited"]
