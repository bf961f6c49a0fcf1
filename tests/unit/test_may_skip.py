"""Skipped tests are counted, and only those that are named may be."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from may_skip import MAY_SKIP, unexpected

TESTS = pathlib.Path(__file__).parent.parent


def test_every_pattern_names_a_file_that_is_there() -> None:
    for pattern, reason in MAY_SKIP.items():
        assert (TESTS.parent / pattern.partition("::")[0]).is_file(), pattern
        assert reason


def test_other_skips_are_unexpected() -> None:
    fine = "tests/faults/test_network.py::test_loss_and_delay_cost_nothing_but_time[ucx-tcp]"
    assert unexpected([fine, "tests/faults/test_killed.py::test_x[shm]"]) == [
        "tests/faults/test_killed.py::test_x[shm]"
    ]


@pytest.mark.parametrize("processes", ["0", "2"])
def test_an_unexpected_skip_fails_the_run(tmp_path: pathlib.Path, processes: str) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\ndef test_it():\n    pytest.skip('quietly')\n")
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    for check, code in (("0", 0), ("1", 1)):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", processes, str(tmp_path)],
            env={"PYTHONPATH": str(TESTS / "support"), "KVXFER_CHECK_SKIPS": check, "PATH": "/usr/bin:/bin"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert ("gives no reason" in done.stdout) == (check == "1")
