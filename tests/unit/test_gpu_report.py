"""What benches/gpu/report.py makes of the stages, with numbers that were never measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPORT = Path(__file__).resolve().parents[2] / "benches" / "gpu" / "report.py"


def kernel(share: float) -> dict[str, Any]:
    blocks = ("all", "16", "32", "64")
    return {
        "copy_gbytes_per_s": 4000.0,
        "of_the_copy": dict.fromkeys(blocks, share),
        "gbytes_per_s": dict.fromkeys(blocks, 4000.0 * share),
    }


def hand_off(times: float) -> dict[str, Any]:
    spread = {"median": 1.0}
    return {
        "tokens": 2000,
        "peer_copy_by": "CUDA IPC",
        "ms": spread,
        "bytes": 65_536_000,
        "gbytes_per_s": 65.5,
        "times_the_peer_copy": times,
        "peer_copy_ms": spread,
        "push_us": spread,
    }


def stages(
    *, share: float = 0.8, times: float = 1.2, slower: float = 0.4, stub: bool = False
) -> dict[str, Any]:
    step = {"step_ms": {key: {"median": 5.0} for key in ("without", "with")}}
    way = step | {"slower_by_percent": slower, "mean_slower_by_percent": slower}
    call = {"p50": 1.0, "p99": 2.0}
    return {
        "machine": {"gpu": "A GPU", "stub": stub, "packages": {"kvxfer": "0.1.0"}},
        "kernels": {"rows": {"4 KiB pack": kernel(share), "256 B unpack": kernel(0.55)}},
        "hand_off": {
            "one rank, HND": hand_off(times),
            "TP8 to TP4, HND": hand_off(9.0),
            "TP8 to TP4, NHD": {"error": "RuntimeError: it broke"},
        },
        "loop": {
            "pushing": way,
            "receiving": way,
            "steps_between_hand_offs": 10,
            "push_us": call,
            "expect_us": call,
            "poll_us": call,
        },
        "nixl": {"absent": ["no wheel"]},
    }


def report(folder: Path, found: dict[str, Any], status: str = "kernels 0\n", *more: str) -> Any:
    (folder / "status").write_text(status)
    for name, stage in found.items():
        (folder / f"{name}.json").write_text(json.dumps(stage))
    out = folder / "out"
    out.mkdir()
    return subprocess.run(
        [sys.executable, str(REPORT), str(folder), str(out), *more],
        capture_output=True,
        text=True,
        check=False,
    )


def test_bars_that_hold(tmp_path: Path) -> None:
    done = report(tmp_path, stages())
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "out" / "table.md").read_text()
    assert text.count(", held |") == 5
    assert "mean nothing" not in text
    assert "not run: no wheel" in text
    assert "| hand-off, TP8 to TP4, NHD | failed: RuntimeError: it broke |" in text


@pytest.mark.parametrize(
    ("numbers", "what"),
    [({"share": 0.69}, "4 KiB pack"), ({"times": 1.51}, "one rank, HND"), ({"slower": 1.1}, "decode step")],
)
def test_bars_that_are_missed(tmp_path: Path, numbers: dict[str, float], what: str) -> None:
    done = report(tmp_path, stages(**numbers))
    assert done.returncode == 2
    assert what in done.stderr
    assert "**missed**" in done.stdout


def test_a_stage_that_failed_is_named_and_the_others_are_there(tmp_path: Path) -> None:
    found = stages()
    del found["loop"]
    done = report(tmp_path, found, "kernels 0\nloop 124\nnixl skipped\n")
    assert done.returncode == 1
    assert "failed: loop, nixl" in done.stderr
    assert "Stages that failed: loop, nixl." in done.stdout
    assert "4 KiB pack" in done.stdout
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["failed"] == ["loop", "nixl"]


def test_only_what_was_measured_on_a_gpu_goes_into_the_docs(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    before = "# GPUs\n<!-- measured: begin -->\nnothing\n<!-- measured: end -->\nrest\n"
    page.write_text(before)
    (tmp_path / "stub").mkdir()
    done = report(tmp_path / "stub", stages(stub=True, share=0.1), "kernels 0\n", "--docs", str(page))
    assert done.returncode == 1
    assert "nothing was measured on a GPU" in done.stderr
    assert page.read_text() == before
    (tmp_path / "gpu").mkdir()
    done = report(tmp_path / "gpu", stages(), "kernels 0\n", "--docs", str(page))
    assert done.returncode == 0
    text = page.read_text()
    assert "A GPU" in text
    assert "nothing" not in text
    assert text.startswith("# GPUs\n<!-- measured: begin -->\n")
    assert text.endswith("<!-- measured: end -->\nrest\n")
