"""How far a comparison is, on standard error."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from jzero.compare.row import Row
from jzero.units import size


class Progress:
    """On a terminal a bar, gone when all stages are done; elsewhere a line for each.

    Arguments:
      stages: how many there are.
      doing: what is done with each.
    """

    def __init__(self, stages: int, doing: str):
        self._console = Console(stderr=True, highlight=False)
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=stages)
        self._doing = doing
        self._last = ""

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, stage: int) -> None:
        self._bar.update(self._task, description=f"{self._last}{self._doing} stage {stage}")

    def done(self, row: Row) -> None:
        peak = "does not compile" if row.peak_bytes is None else size(row.peak_bytes)
        self._last = f"stage {row.stage}: {peak}; "
        self._bar.advance(self._task)
        if not self._console.is_terminal:
            self._console.print(f"{self._doing} stage {row.stage}: {peak}")
