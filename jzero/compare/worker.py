"""One stage in its own process: `python -m jzero.compare.worker RESULT`, the request on stdin.

A plugin, once loaded, stays in a process, and flags are read once: so each program has its own.
"""

import json
import logging
import sys
from pathlib import Path

from jzero.compare.program import compile_stage
from jzero.compare.request import Request
from jzero.errors import JzeroError, RunFailed
from jzero.factory import one_line


class Notices(logging.Handler):
    """Keeps what jzero warns of, for the process that shows it."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    """Writes an answer to RESULT.

    That is what `compile_stage` returns, with "notices"; or {"failed": message, "usage": whose
    fault}.
    """
    notices = Notices()
    logging.getLogger("jzero").addHandler(notices)
    try:
        answer = compile_stage(Request.from_dict(json.load(sys.stdin)))
        if answer:
            answer["notices"] = notices.lines
    except JzeroError as error:
        answer = {"failed": str(error), "usage": True}
    except RunFailed as error:
        answer = {"failed": str(error), "usage": False}
    except Exception as error:
        answer = {"failed": one_line(error), "usage": False}
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
