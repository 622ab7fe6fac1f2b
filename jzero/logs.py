"""The `jzero` logger: what it shows, and in which process."""

import logging

import jax

from jzero.config import Config

log = logging.getLogger("jzero")


def in_first_process(record: logging.LogRecord) -> bool:
    """A filter: what every process would say is said once."""
    return jax.process_index() == 0


def set_logging(config: Config) -> None:
    """Shows what the configuration asks to be printed, where the program shows no logs itself."""
    if config.log_level is not None:
        log.setLevel(config.log_level.upper())
    elif config.steps_per_print or config.dump_state:
        log.setLevel(logging.INFO)
    if not log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.addHandler(logging.StreamHandler())
