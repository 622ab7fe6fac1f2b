"""The example is a folder of scripts, whose modules are imported by their bare names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "lm"))
