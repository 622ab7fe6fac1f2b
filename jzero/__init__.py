"""ZeRO sharding, stages 0 to 3, for JAX, Flax and Optax."""

from jzero.errors import ConfigError as ConfigError
from jzero.errors import JzeroError as JzeroError
from jzero.losses import Mean as Mean
from jzero.models import stop_gradient as stop_gradient
from jzero.sharded import gather as gather
from jzero.state import State as State
from jzero.zero import Zero as Zero
from jzero.workload import Workload as Workload
