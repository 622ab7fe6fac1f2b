"""How each way of writing a model is given parameters that gather when they are read."""

from jzero.models.describe import describe as describe
from jzero.models.describe import stop_gradient as stop_gradient
from jzero.models.model import Model as Model
from jzero.models.model import removed_axes as removed_axes
