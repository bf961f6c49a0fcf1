"""`python -m kvxfer`, for environments in which the `kvxfer` command is not on the path."""

from __future__ import annotations

import sys

from kvxfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
