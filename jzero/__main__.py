"""`python -m jzero`: the same as the command `jzero`."""

import sys

from jzero.cli import main

if __name__ == "__main__":
    sys.exit(main())
