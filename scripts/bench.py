"""How fast a jzero step is, beside the same step written otherwise: see benchmarks/bench.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "lm")]
    from benchmarks.bench import main

    sys.exit(main())
