"""What all tests share."""

from __future__ import annotations

import os

# Before numpy loads: its threads would take the cores that the tests' processes need.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
