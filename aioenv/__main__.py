"""`python -m aioenv`: the same as the `aioenv` command."""

from __future__ import annotations

import sys

from aioenv.cli import main

if __name__ == "__main__":
    sys.exit(main())
