"""`kvxfer doctor` on this host, without UCX, and with each UCX that is here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_stub
import pytest

from kvxfer.cli.doctor import _show

pytestmark = pytest.mark.timeout(100)


def doctor(*arguments: str, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "doctor", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result


def check_shm(found: dict[str, Any]) -> None:
    shm = found["fabrics"]["shm"]
    assert shm["ok"] is True
    assert shm["bytes"] == 64 << 20
    assert 0.01 < shm["gbytes_per_s"] < 1000
    assert shm["engine_memory"]["ok"] or shm["engine_memory"]["error"] in " ".join(found["problems"])


def check_ucx(found: dict[str, Any], path: str) -> None:
    ucx, fabric = found["ucx"], found["fabrics"]["ucx"]
    assert Path(ucx["path"]).samefile(path)
    assert [part.isdigit() for part in ucx["version"].split(".")] == [True] * 3
    assert "tcp" in ucx["transports"]
    assert isinstance(ucx["rdma"], bool)
    assert fabric["ok"] is True
    assert 0.01 < fabric["gbytes_per_s"] < 1000
    assert set(fabric["one_sided"]) <= set(ucx["transports"]) - {"self"}
    # TCP has no writes that the receiver does not take part in; memory that is shared has nothing else.
    assert fabric["one_sided"]["tcp"] is False
    assert fabric["one_sided"]["posix"] is True
    assert "posix" in fabric["probes"]["posix"]["lanes"] or fabric["probes"]["posix"]["lanes"] == []
    said = " ".join(found["problems"])
    assert ucx["rdma"] or "no RDMA transport" in said
    older = tuple(int(part) for part in ucx["version"].split("."))[:2] < (1, 22)
    assert (f"UCX {ucx['version']} is older than 1.22" in said) == older


def test_without_ucx(capsys: pytest.CaptureFixture[str]) -> None:
    """Shared memory works, and the report says what to do about the rest; also in text for people."""
    result = doctor(
        "--json", KVXFER_UCX_LIBRARY="/nonexistent/libucp.so.0", KVXFER_CUDA_LIBRARY="/nonexistent/libcuda.so"
    )
    assert "kvxfer: testing shm between two processes" in result.stderr
    found = json.loads(result.stdout)
    check_shm(found)
    assert found["ucx"]["path"] is None
    assert found["ucx"]["version"] is None
    assert found["ucx"]["transports"] == []
    assert found["ucx"]["rdma"] is False
    assert found["fabrics"]["ucx"]["ok"] is False
    assert found["fabrics"]["ucx"]["one_sided"] == {}
    assert any("/nonexistent/libucp.so.0" in text and "libucx-cu12" in text for text in found["problems"])
    assert found["gpus"]["devices"] == []
    assert "/nonexistent/libcuda.so" in found["gpus"]["error"]
    states = {line["name"]: line["state"] for line in found["rdma"]["lines"]}
    # Without UCX neither is well, on whatever host this runs.
    assert {states["CUDA in UCX"], states["RDMA in UCX"]} <= {"fail", "not applicable"}
    assert found["rdma"]["rails"] == []
    assert found["host"]["dev_shm_bytes"] is None or found["host"]["dev_shm_bytes"] > 0
    assert {pool["page_bytes"] % 4096 for pool in found["host"]["huge_pages"]} <= {0}

    _show(found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["UCX", "none"]
    for word in ("process_vm_readv", "locked memory", "huge pages", "/dev/shm", "GPUs", "shm "):
        assert any(line.strip().startswith(word) for line in lines), word
    numbered = lines[lines.index("What limits this host, and what to do:") + 2 :]
    assert [line.split(".")[0].strip() for line in numbered] == [
        str(number + 1) for number in range(len(found["problems"]))
    ]


@pytest.mark.ucx
@pytest.mark.parametrize("which", ["KVXFER_TEST_UCX_WHEEL", "KVXFER_TEST_UCX_SYSTEM"])
def test_with_ucx(which: str) -> None:
    path = os.environ.get(which)
    if not path:
        pytest.skip(f"{which} names no UCX")
    found = json.loads(doctor("--json", KVXFER_UCX_LIBRARY=path).stdout)
    check_shm(found)
    check_ucx(found, path)


def test_the_driver_says_where_gpus_are_and_what_cards_may_do(tmp_path: Path) -> None:
    """On the stub driver, whose capital letters are not the kernel's."""
    script = "import json; from kvxfer import _kvxfer as k\n"
    script += "print(json.dumps([k._doctor_gpus(), k._device_pci(1)]))"
    for defines, may in (([], True), (["-DRDMA=0"], False)):
        library = cuda_stub.build(tmp_path, defines=defines)
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "KVXFER_CUDA_LIBRARY": str(library)},
            capture_output=True,
            text=True,
            check=True,
        )
        found, second = json.loads(done.stdout)
        assert [gpu["pci"] for gpu in found["devices"]] == ["0000:1a:00.0", "0000:1b:00.0"]
        assert second == "0000:1b:00.0"
        assert [(gpu["rdma"], gpu["dmabuf"]) for gpu in found["devices"]] == [(may, may)] * 2
    library = cuda_stub.build(tmp_path, defines=["-DcuDeviceGetPCIBusId=gone"])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "KVXFER_CUDA_LIBRARY": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "FabricError" in done.stderr
    assert "lacks cuDeviceGetPCIBusId" in done.stderr
