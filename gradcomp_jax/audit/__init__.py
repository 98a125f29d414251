"""Audit: the bytes that a compiled program moves between devices."""

from gradcomp_jax.audit.report import CollectiveRow, Conditional, Totals, WireReport
from gradcomp_jax.audit.wire_bytes import wire_bytes

__all__ = ["CollectiveRow", "Conditional", "Totals", "WireReport", "wire_bytes"]
