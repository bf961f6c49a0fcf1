"""The UCX that rails are chosen for is asked by a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer import _ucx_look
from kvxfer.errors import FabricError

_ASK = """
import json
from kvxfer._ucx_look import look
rdma, path = look()
with open("/proc/self/maps") as maps:
    loaded = "libucp" in maps.read()
print(json.dumps({"rdma": rdma, "path": path, "loaded": loaded}))
"""


@pytest.mark.ucx
def test_asking_for_rdma_loads_no_ucx_into_the_engines_process() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _ASK], capture_output=True, text=True, timeout=60, check=True
    )
    found = json.loads(done.stdout)
    assert Path(found["path"]).exists()
    assert not found["loaded"]


def test_a_ucx_that_is_not_there_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = tmp_path / "libucp.so.0"
    monkeypatch.setenv("KVXFER_UCX_LIBRARY", os.fspath(missing))
    with pytest.raises(FabricError, match=str(missing)):
        _ucx_look.look()


def test_a_process_that_dies_in_ucx_is_an_error_and_not_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(FabricError, match="ended with 1 and said nothing"):
        _ucx_look.look()
