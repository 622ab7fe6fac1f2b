"""ZeRO sharding, stages 0 to 3, for JAX, Flax and Optax."""

from jzero.auditing import audit
from jzero.checkpoint import DamagedCheckpoint
from jzero.errors import ConfigError, JzeroError, RunFailed
from jzero.losses import Mean
from jzero.models import stop_gradient
from jzero.sharded import gather
from jzero.state import State
from jzero.watch import ScaleError
from jzero.workload import Workload
from jzero.zero import Zero

__all__ = [
    "ConfigError",
    "DamagedCheckpoint",
    "JzeroError",
    "Mean",
    "RunFailed",
    "ScaleError",
    "State",
    "Workload",
    "Zero",
    "audit",
    "gather",
    "stop_gradient",
]
