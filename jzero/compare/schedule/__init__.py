"""A compiled program's schedule as data: what is computed, and what is sent meanwhile."""

from jzero.compare.schedule.parts import Part, Schedule, Step, Transfer
from jzero.compare.schedule.read import MOST, schedule

__all__ = ["MOST", "Part", "Schedule", "Step", "Transfer", "schedule"]
