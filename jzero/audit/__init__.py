"""`jzero.audit`: what a compiled function needs, sends and keeps, and assertions on it."""

from jzero.audit.audit import audit as audit
from jzero.audit.report import Report as Report
