"""One stage in its own process: `python -m jzero.compare.worker RESULT`, the request on stdin.

A plugin, once loaded, stays in a process, and flags are read once: so each program has its own.
"""

import json
import sys
from pathlib import Path

from jzero.compare.program import measure
from jzero.compare.request import Request
from jzero.errors import JzeroError, RunFailed
from jzero.factory import one_line


def main() -> None:
    """Writes what `measure` returns, or {"failed": message, "usage": whose fault} to RESULT."""
    try:
        answer = measure(Request.from_dict(json.load(sys.stdin)))
    except JzeroError as error:
        answer = {"failed": str(error), "usage": True}
    except RunFailed as error:
        answer = {"failed": str(error), "usage": False}
    except Exception as error:
        answer = {"failed": one_line(error), "usage": False}
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
