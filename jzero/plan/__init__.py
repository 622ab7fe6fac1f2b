"""What each stage costs, without a compiler: `jzero plan`."""

from jzero.plan.leaves import lay_out as lay_out
from jzero.plan.paper import closed_form as closed_form
from jzero.plan.paper import comm_elements as comm_elements
from jzero.plan.plan import Plan as Plan
from jzero.plan.plan import of_model as of_model
from jzero.plan.plan import of_params as of_params
from jzero.plan.rows import Row as Row

__all__ = ["Plan", "Row", "closed_form", "comm_elements", "lay_out", "of_model", "of_params"]
