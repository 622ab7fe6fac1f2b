"""How a benchmark ends: its exit code, with one line where it fails."""

import sys
from collections.abc import Callable

import jax

from jzero.errors import JzeroError, RunFailed


def ended(name: str, act: Callable[[], int]) -> int:
    """Runs a benchmark: what it returns; 2 for bad usage, 1 for a failure while running.

    Arguments:
      name: of the script.
      act: the benchmark.
    """

    def failed(error: object, code: int) -> int:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return code

    try:
        return act()
    except KeyboardInterrupt:
        return failed("interrupted", 130)
    except JzeroError as error:
        return failed(error, 2)
    except (RunFailed, OSError) as error:
        return failed(error, 1)
    except jax.errors.JaxRuntimeError as error:  # such as no memory; the rest is XLA's own account
        return failed(str(error).partition("\n")[0], 1)
