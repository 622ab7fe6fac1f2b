"""Reading a DeepSpeed-style configuration, and building the optimizer that it names."""

from jzero.config.batch import Batch as Batch
from jzero.config.config import Config as Config
from jzero.config.config import LossScale as LossScale
from jzero.config.config import load as load
from jzero.config.optimizers import build_optimizer as build_optimizer
from jzero.config.schedules import build_schedule as build_schedule

__all__ = ["Batch", "Config", "LossScale", "build_optimizer", "build_schedule", "load"]
