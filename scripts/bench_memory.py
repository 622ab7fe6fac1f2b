"""Peak memory of several shapes of model, against a bound: see benchmarks/memory.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "lm")]
    from benchmarks.memory import main

    sys.exit(main())
