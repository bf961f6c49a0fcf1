"""`kvxfer bench transfer`: every row is there and was counted right; of speed only wide ratios are tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import kvxfer as kx
from kvxfer import _kvxfer
from kvxfer.cli._bench_rank import (
    ROW_BYTES,
    Pages,
    _readv_ns,
    _vectors,
    layout_of,
    page_lists,
    pieces_of,
)

pytestmark = pytest.mark.timeout(110)


def bench(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvxfer.cli", "bench", "transfer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)


SMALL = (
    *(
        "--tokens",
        "320",
        "--page-tokens",
        "16",
        "--rooms",
        "1",
        "3",
        "--rooms-tokens",
        "160",
        "--rounds",
        "3",
    ),
    *("--small-tokens", "64", "--large-tokens", "16000", "--latency-rooms", "10"),
    *("--in-flight", "200"),
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result = bench(*SMALL, "--fabric", "shm", "--json")
    assert result.returncode == 0, result.stderr
    out: dict[str, Any] = json.loads(result.stdout)
    return out


def test_there_is_a_row_for_each_memory_page_order_and_number_of_rooms(found: dict[str, Any]) -> None:
    rows = {(row["memory"], row["pages"], row["tokens"], row["rooms"]): row for row in found["rows"]}
    assert set(rows) == {
        (memory, *case)
        for memory in ("kvxfer", "engine")
        for case in (
            ("shuffled", 320, 1),
            ("contiguous", 320, 1),
            ("shuffled", 160, 1),
            ("shuffled", 160, 3),
        )
    }
    for (memory, pages, tokens, rooms), row in rows.items():
        assert (row["fabric"], row["order"], row["page_tokens"]) == ("shm", "HND", 16)
        assert row["bytes"] == tokens * rooms * 32 * 1024
        # 64 layers, K and V: a write a page and region; of neighbours, a write a region and slice.
        whole = 128 * tokens // 16 * rooms
        assert row["writes"] == whole if pages == "shuffled" else 128 <= row["writes"] < whole
        assert (row["syscalls"] > 0) == (memory == "engine")
        assert row["seconds_p25"] <= row["seconds_p50"] <= row["seconds_p75"]
        assert row["gbytes_per_s"] == pytest.approx(row["bytes"] / row["seconds_p50"] / 1e9)
        assert row["ratio_to_copy"] == pytest.approx(row["seconds_p50"] / row["copy_seconds_p50"])
        if memory == "engine":
            assert row["ratio_to_readv"] == pytest.approx(row["seconds_p50"] / row["readv_seconds_p50"])
            assert row["ratio_to_readv"] > 0.2
        else:
            assert row["ratio_to_readv"] is None
        # Nothing is faster than a copy by much: another thing was timed then.
        assert row["ratio_to_copy"] > 0.2


def test_the_first_use_of_every_page_has_rows_of_its_own(found: dict[str, Any]) -> None:
    rows = found["first_touch"]
    assert [(row["fabric"], row["memory"]) for row in rows] == [("shm", "kvxfer"), ("shm", "engine")]
    for row in rows:
        # Room for two of the largest: 640 tokens.
        assert row["bytes"] == 640 * 32 * 1024
        assert row["ratio_to_copy"] == pytest.approx(row["seconds"] / row["copy_seconds"])


def test_the_small_room_was_beside_large_ones(found: dict[str, Any]) -> None:
    (row,) = found["fairness"]
    assert (row["fabric"], row["small_tokens"], row["large_tokens"], row["large_rooms"]) == (
        "shm",
        64,
        16_000,
        4,
    )
    assert row["slowdown"] == pytest.approx(row["beside_ms_p50"] / row["alone_ms_p50"])
    assert 1 <= row["rounds"] <= 3
    # Behind them all it would wait for 1,000 times its own bytes.
    assert row["slowdown"] < 500


def test_latency_has_a_piece_and_a_page_of_each_mode(found: dict[str, Any]) -> None:
    rows = {(row["what"], row["mode"]): row for row in found["latency"]}
    assert set(rows) == {(what, mode) for what in ("piece", "page") for mode in ("spinning", "idle")}
    for (what, _), row in rows.items():
        assert (row["bytes"], row["pieces"]) == ((4096, 1) if what == "piece" else (524_288, 128))
        assert 0 < row["to_event_us_p50"] <= row["to_poll_us_p50"] <= row["to_poll_us_p99"]
        assert 0 < row["copy_us_p50"] < row["to_event_us_p50"]
        assert row["ping_us_p50"] > 0


def test_rooms_in_flight_take_memory_and_not_much(found: dict[str, Any]) -> None:
    (row,) = found["in_flight"]
    assert (row["fabric"], row["rooms"], row["tokens"]) == ("shm", 200, 2000)
    for side in ("prefill", "decode"):
        # Each room has 125 page ids of 4 bytes; ten times the bar for a thousand is something else.
        assert 200 * 125 * 4 < row[f"{side}_bytes"] < 320 << 20


@pytest.mark.ucx
def test_ucx_and_the_table_for_people() -> None:
    result = bench(*SMALL, "--fabric", "ucx", "--memory", "kvxfer")
    assert result.returncode == 0, result.stderr
    assert "x copy" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("  ucx     kvxfer")]
    assert [(row[2], row[4], row[5]) for row in rows] == [
        ("shuffled", "320", "1"),
        ("contiguous", "320", "1"),
        ("shuffled", "160", "1"),
        ("shuffled", "160", "3"),
    ]
    assert max(map(len, result.stdout.splitlines())) <= 110


def test_shared_memory_is_measured_where_there_is_no_ucx() -> None:
    environment = {**os.environ, "KVXFER_UCX_LIBRARY": "/no/such/libucp.so.0"}
    result = bench(*SMALL, "--fabric", "shm", "--memory", "kvxfer", "--json", env=environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["machine"]["ucx"] is None
    result = bench(*SMALL, "--fabric", "ucx", env=environment)
    assert result.returncode == 1
    assert "/no/such/libucp.so.0" in result.stderr
    assert "Traceback" not in result.stderr


def test_small_rooms_with_nothing_beside_them_are_refused() -> None:
    result = bench(*SMALL[:-4], "--large-tokens", "16", "--fabric", "shm", "--memory", "kvxfer")
    assert result.returncode == 1
    assert "take more --large-tokens" in result.stderr


def test_more_memory_than_there_is_is_refused_at_once() -> None:
    result = bench("--tokens", "100000000", "--fabric", "shm")
    assert result.returncode == 1
    assert "MiB are free" in result.stderr


def test_the_copy_moves_just_its_pieces() -> None:
    to, source = [3, 4, 0], [1, 2, 5]
    dst, src, lens = pieces_of(to, source, tokens=40, page_tokens=16)
    page = 16 * ROW_BYTES
    # Pages 3 and 4 are neighbours on both sides; the last one is half full.
    assert [list(map(int, a)) for a in (dst, src, lens)] == [
        [3 * page, 0],
        [page, 5 * page],
        [2 * page, page // 2],
    ]
    there = np.random.default_rng(1).integers(1, 255, (2, 6 * page), dtype=np.uint8)
    here = np.zeros((2, 6 * page), np.uint8)
    assert _kvxfer._bench_copy(list(zip(here, there, strict=True)), dst=dst, src=src, lens=lens) > 0
    want = np.zeros_like(here)
    want[:, 3 * page : 5 * page] = there[:, page : 3 * page]
    want[:, : page // 2] = there[:, 5 * page : 5 * page + page // 2]
    assert np.array_equal(here, want)


def test_the_kernel_reads_just_the_same_pieces() -> None:
    layout = layout_of(0, 16)
    source, target = (Pages(side, "shm", "engine", layout, 8) for side in ("prefill", "decode"))
    to, theirs = np.array([3, 4, 0], np.int32), np.array([1, 2, 5], np.int32)
    dst, src, lens = pieces_of(to, theirs, tokens=40, page_tokens=16)
    ours, there = ([side.regions[0].ctypes.data] for side in (target, source))
    assert _readv_ns(os.getpid(), _vectors(ours, dst, lens), _vectors(there, src, lens)) > 0
    assert target.has(to, theirs, 40)
    assert (target.regions[0].reshape(8, -1)[[1, 2, 5, 6, 7]] == 0xA5).all()
    with pytest.raises(OSError, match="process_vm_readv"):
        _readv_ns(os.getpid(), _vectors(ours, dst, lens), _vectors([8], src, lens))


@pytest.mark.parametrize(("dst", "lens"), [([4090], [8]), ([2**64 - 4], [8]), ([0, 0], [1])])
def test_a_copy_that_leaves_its_region_is_refused(dst: list[int], lens: list[int]) -> None:
    here, there = np.zeros(4096, np.uint8), np.ones(4096, np.uint8)
    numbers = {"dst": dst, "src": [0], "lens": lens}
    arrays = {key: np.array(value, np.uint64) for key, value in numbers.items()}
    with pytest.raises(kx.BadArgument):
        _kvxfer._bench_copy([(here, there)], **arrays)
    assert not here.any()


def test_page_lists_share_no_page() -> None:
    for shuffled in (True, False):
        lists = page_lists(103, 10, shuffled=shuffled, seed=4)
        assert len(lists) == 10
        assert len(np.unique(np.concatenate(lists))) == 100
    assert np.array_equal(lists[1], np.arange(10, 20))
