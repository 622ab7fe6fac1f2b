"""Which line of the user's an instruction comes from, as far as a program's text has kept it.

Newer texts have tables of frames above the first computation, and `stack_frame_id` points into
them; older ones name file and line beside the instruction.
"""

import re
from dataclasses import dataclass
from pathlib import PurePath

from jzero.hlo.text import Instruction

_BESIDE = re.compile(r'\bsource_file="([^"]*)" source_line=(\d+)')
_POINTER = re.compile(r"\bstack_frame_id=(\d+)")
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_PLACE = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE)
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


@dataclass(frozen=True)
class Frames:
    """A program's table of source lines.

    Attributes:
      places: frame -> (file, line).
      callers: frame -> the frame that called it.
    """

    places: dict[int, tuple[str, int]]
    callers: dict[int, int]

    def line(self, instruction: Instruction) -> str:
        """`file.py:21`, the innermost line outside of installed packages; "" where none is kept."""
        beside = _BESIDE.search(instruction.attributes)
        if beside:
            return f"{PurePath(beside[1]).name}:{beside[2]}"
        pointer = _POINTER.search(instruction.attributes)
        stack: list[int] = []
        frame = int(pointer[1]) if pointer else 0
        while frame in self.places and frame not in stack:
            stack.append(frame)
            frame = self.callers.get(frame, 0)
        places = [self.places[frame] for frame in stack]
        own = (place for place in places if not _INSTALLED.search(place[0]))
        place = next(own, places[0] if places else None)
        return "" if place is None else f"{PurePath(place[0]).name}:{place[1]}"


def frames(text: str) -> Frames:
    """Reads the tables of a compiled module's text; empty where it has none."""
    files_at = text.find("\nFileNames\n")
    if files_at < 0:
        return Frames({}, {})
    places_at, frames_at = text.find("\nFileLocations\n"), text.find("\nStackFrames\n")
    names_at = text.find("\nFunctionNames\n")
    end = text.find("\n\n", frames_at)
    files = dict(_FILE.findall(text[files_at:names_at]))
    lines = {
        n: (files.get(f, ""), int(line)) for n, f, line in _PLACE.findall(text[places_at:frames_at])
    }
    table = _FRAME.findall(text[frames_at:end])
    # XLA writes a caller's number plus one: a frame that nothing called is its own first.
    return Frames(
        {int(frame): lines[place] for frame, place, _ in table if place in lines},
        {int(frame): int(caller or 1) - 1 for frame, _, caller in table},
    )
