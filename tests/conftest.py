"""What all tests share."""

from __future__ import annotations

import os

# Before numpy loads: its threads would take the cores that the tests' processes need.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from may_skip import unexpected

_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Only the skips that `may_skip.py` names are no failure, where that is asked for."""
    if os.environ.get("KVXFER_CHECK_SKIPS") != "1" or hasattr(session.config, "workerinput"):
        return  # not asked for, or one of several processes whose reports come together in another
    if wrong := unexpected(_skipped):
        print("\nskipped, and tests/support/may_skip.py gives no reason for it:", *wrong, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
