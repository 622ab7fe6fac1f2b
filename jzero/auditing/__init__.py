"""`jzero.audit`: what a compiled function needs, sends and keeps, and assertions on it."""

from jzero.auditing.audit import audit
from jzero.auditing.moved import Moved
from jzero.auditing.origins import Kind
from jzero.auditing.report import Report

__all__ = ["Kind", "Moved", "Report", "audit"]
