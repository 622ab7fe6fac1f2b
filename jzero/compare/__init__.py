"""`jzero compare`: the real train step of each stage, compiled, and what its program costs."""

from jzero.compare.request import Request as Request
from jzero.compare.row import Result as Result
from jzero.compare.row import Row as Row
from jzero.compare.runner import compare as compare
