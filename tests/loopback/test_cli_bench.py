"""`kvxfer bench post`: every key is there, and the figures are sane; how low they are is not tested here."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvxfer.cli.bench_post import _first_writes, _percentile, slope

pytestmark = pytest.mark.timeout(100)


def bench(*arguments: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "bench", "post", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_every_figure_is_there_and_sane() -> None:
    found = bench("--tokens", "320", "--rooms", "30", "--by-tokens", "160", "64000")
    # Far above what is aimed at: these say that the right thing was timed, in the right unit.
    limits = {
        "push_us_p50": 5_000,
        "push_us_p99": 1_000_000,
        "push_first_us_p50": 5_000,
        "expect_us_p50": 5_000,
        "expect_first_us_p50": 5_000,
        "host_wake_us_p50": 5_000,
        "poll_empty_ns_p50": 20_000,
        "push_list_ns_per_page": 2_000,
        "submit_to_first_write_us_p50": 1_000_000,
    }
    for key, most in limits.items():
        assert 0 < found[key] < most, (key, found[key])
    # A few bytes are copied: on a busy machine that can drown in noise, but not by far.
    assert -50 < found["push_ns_per_page"] < 200
    assert found["push_us_p50"] <= found["push_us_p99"] <= found["push_us_max"]
    assert found["expect_us_p99"] <= found["expect_us_max"]
    assert found["poll_empty_ns_p50"] <= found["poll_empty_ns_p99"]
    assert found["submit_to_first_write_us_p50"] <= found["submit_to_first_write_us_max"]
    assert [(row["tokens"], row["pages"], row["calls"]) for row in found["rows"]] == [
        (160, 10, 300),
        (64_000, 4000, 300),
    ]
    few, many = found["rows"]
    for kind in ("push", "push_list", "expect", "expect_list"):
        for row in (few, many):
            ranks = [row[f"{kind}_us_{rank}"] for rank in ("min", "p50", "p99", "max")]
            assert ranks == sorted(ranks)
    # 4,000 ids of a list take 40 us to convert; whatever else a call meets, it meets with an array too. The
    # least, because a call may be interrupted.
    for kind in ("push", "expect"):
        assert many[f"{kind}_list_us_min"] > many[f"{kind}_us_min"] + 8
    assert list(found["push_us_p20_by_pages"]) == ["125", "250", "500", "1000", "2000"]
    assert (found["fabric"], found["tokens"], found["pages"], found["rooms"]) == ("shm", 320, 20, 32)


def test_slope_is_not_moved_by_an_outlier() -> None:
    line = [(x, 3.0 * x + 7) for x in (1, 2, 4, 8, 16)]
    assert slope(line) == pytest.approx(3)
    assert slope([*line, (32, 1e9)]) == pytest.approx(3, rel=0.2)


def test_percentiles() -> None:
    assert [_percentile([5, 1, 3, 2, 4], p) for p in (0, 50, 99, 100)] == [1, 3, 5, 5]


def test_the_first_write_is_that_of_the_side_that_moved_it() -> None:
    prefill = [
        {"number": 0, "submitted_us": 100, "first_write_us": 0},
        {"number": 1, "submitted_us": 101, "first_write_us": 0},
        {"number": 0, "submitted_us": 200, "first_write_us": 230},
    ]
    decode = [{"first_write_us": 150}, {"first_write_us": 190}, {"first_write_us": 0}]
    assert _first_writes(prefill, decode) == [50, 30]


def test_bench_plan_has_every_case_and_counts_its_writes() -> None:
    command = [
        sys.executable,
        "-m",
        "kvxfer.cli",
        "bench",
        "plan",
        "--tokens",
        "320",
        "--repeats",
        "3",
        "--json",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    cases = {(case["order"], case["pages"]): case for case in found["cases"]}
    assert (len(cases), found["repeats"]) == (4, 3)
    # 64 layers, K and V; 20 pages of one head, or 320 tokens.
    counts = {key: (case["runs"], case["writes"]) for key, case in cases.items()}
    assert counts == {
        ("HND", "shuffled"): (128 * 20, 128 * 20),
        ("HND", "contiguous"): (128 * 20, 128 * 20),
        ("NHD", "shuffled"): (128 * 320, 128 * 320),
        ("NHD", "contiguous"): (128 * 320, 128 * 320),
    }
    for case in cases.values():
        assert (case["rows"], case["bytes"]) == (128 * 320, 128 * 320 * 256)
        # Far above what is aimed at: these say that the right thing was timed, in the right unit.
        assert 0 < case["ns_per_run"] < 2_000
        assert case["plan_us_p50"] == pytest.approx(case["ns_per_run"] * case["runs"] / 1e3)
        assert case["cursor_us_p50"] < case["plan_us_p50"]
        assert 0 < case["template_us_p50"] < 10_000
