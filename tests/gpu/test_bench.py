"""benches/gpu/run.sh from end to end on the stub driver: a GPU is not where it runs for the first time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer._memory import ucx_wheel_dir

ROOT = Path(__file__).resolve().parents[2]
STAGES = [
    "stub",
    "machine",
    "tests",
    "kernels",
    "hand_off",
    "loop",
    "nixl",
    "protocols",
    "single_writes",
    "doctor",
]


@pytest.mark.timeout(400)
def test_the_whole_script_runs_on_the_stub(tmp_path: Path) -> None:
    if ucx_wheel_dir() is None:
        pytest.skip("the libucx wheel is not installed")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to build the stub driver with")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("KVXFER_", "UCX_"))
    }
    page = (ROOT / "docs/gpu.md").read_text()
    done = subprocess.run(
        [str(ROOT / "benches/gpu/run.sh"), "--stub", "--out", str(tmp_path)],
        env=environment | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == dict.fromkeys(STAGES, "0")
    assert result["stub"] is True
    assert result["stages"]["hand_off"]["TP8 to TP4, NHD, packed"]["bytes"] == 2 * 2 * 64 * 64 * 256
    assert any("ucp_put" in line for said in result["stages"]["protocols"]["said"] for line in said)
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("**On the stub driver: these numbers mean nothing.**")
    assert "2 passed, 0 failed" in table
    # No bar is held or missed here.
    assert "held" not in table
    assert "missed" not in table
    assert (ROOT / "docs/gpu.md").read_text() == page


def test_wheels_are_asked_for() -> None:
    done = subprocess.run(
        [str(ROOT / "benches/gpu/run.sh")], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 64
    assert "name the folder with the wheels" in done.stderr
