"""What only a device can tell, peak memory and overhead: see benchmarks/gpu_check.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "lm")]
    from benchmarks.gpu_check import main

    sys.exit(main())
