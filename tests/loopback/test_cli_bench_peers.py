"""`kvxfer bench peers`: kvxfer's own rows, rows that say why a library is missing, and like with like."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.cli._peer_base import PAGE_TOKENS, End, Turn

pytestmark = [pytest.mark.timeout(110), pytest.mark.ucx]

PEERS_PYTHON = Path(__file__).resolve().parents[2] / ".venv-peers" / "bin" / "python"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "kvxfer.cli",
        "bench",
        "peers",
        "--tokens",
        "320",
        "--rounds",
        "3",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def found(*arguments: str) -> dict[str, Any]:
    result = bench("--json", *arguments)
    assert result.returncode == 0, result.stderr
    out: dict[str, Any] = json.loads(result.stdout)
    return out


CASES = {(pages, target) for pages in ("shuffled", "contiguous") for target in ("idle", "busy")}


def test_a_library_that_is_not_there_has_a_row_that_says_why() -> None:
    out = found("--peers", "nixl", "ucxx")
    assert (out["tokens"], out["pieces"], out["bytes"]) == (320, 2560, 320 * 32 * 1024)
    assert {(row["pages"], row["target"]) for row in out["kvxfer"] if row["fabric"] == "ucx"} == CASES
    assert len(out["kvxfer"]) == 3 * len(CASES)
    for row in out["kvxfer"]:
        assert row["rounds"] == 3
        assert row["post_us_p50"] > 0 < row["total_ms_p50"]
        assert 0 < row["cpu_s_per_gbyte"] < 1000
    assert [row["peer"] for row in out["rows"]] == ["nixl", "ucxx"]
    for row, module in zip(out["rows"], ("nixl_cu12", "ucxx"), strict=True):
        assert f"No module named '{module}'" in row["error"]
        assert {row[key] for key in ("version", "post_us_p50", "total_ms_p50", "speedup", "speedup_ucx")} == {
            None
        }


def test_an_interpreter_that_is_not_there_is_named() -> None:
    result = bench("--peers", "mooncake", "--python", "/no/such/python")
    assert result.returncode == 0, result.stderr
    assert "mooncake: could not take part: /no/such/python: No such file or directory" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 130


@pytest.mark.skipif(
    not PEERS_PYTHON.exists(), reason="`make bench-peers` has not installed the other libraries"
)
def test_every_library_moves_the_bytes() -> None:
    out = found("--python", str(PEERS_PYTHON))
    assert {(row["peer"], row["error"]) for row in out["rows"]} == {
        (peer, None) for peer in ("nixl", "nixl-tuned", "mooncake", "ucxx")
    }
    assert {(row["pages"], row["target"]) for row in out["rows"]} == CASES
    best = {
        case: min(row["total_ms_p50"] for row in out["kvxfer"] if (row["pages"], row["target"]) == case)
        for case in CASES
    }
    for row in out["rows"]:
        assert row["speedup"] == pytest.approx(row["total_ms_p50"] / best[row["pages"], row["target"]])


class _Copies(End):
    """A library that gets some bytes wrong if it is told to."""

    def info(self) -> dict[str, Any]:
        return {}

    def connect(self, other: dict[str, Any]) -> None:
        raise AssertionError("nothing to connect")

    def post(self, turn: Turn) -> None:
        raise AssertionError("nothing is posted")

    def finish(self, turn: Turn) -> None:
        raise AssertionError("nothing is posted")


def test_what_did_not_come_is_noticed() -> None:
    source, target = _Copies("prefill", "engine", "shm", 8), _Copies("decode", "engine", "shm", 8)
    turn = Turn(1, np.array([5, 2], np.int32), np.array([7, 1], np.int32))
    for ours, theirs in zip(target.regions, source.regions, strict=True):
        ours.reshape(8, -1)[turn.to] = theirs.reshape(8, -1)[turn.source]
    assert target.has(turn.to, turn.source, 2 * PAGE_TOKENS)
    assert not target.has(turn.to, turn.source[::-1], 2 * PAGE_TOKENS)
    target.regions[77][5 * target.page_bytes + 9] ^= 1
    assert not target.has(turn.to, turn.source, 2 * PAGE_TOKENS)
    target.regions[77][5 * target.page_bytes + 9] ^= 1
    target.spoil(turn.to[:1])
    assert not target.has(turn.to, turn.source, 2 * PAGE_TOKENS)
    assert np.array_equal(
        target.addresses(target.bases, turn.to)[:2], target.bases[0] + np.uint64(4096) * turn.to
    )
