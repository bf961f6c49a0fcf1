"""`kvxfer soak`: nothing grows with the number of hand-offs. `make soak` does it with a million."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvxfer.cli.soak import growth

# The machine may be busy with something else; of itself the longest takes a third of it.
LIMIT_S = 110


def soak(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvxfer.cli", "soak", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any], rooms: int) -> None:
    assert (found["rooms"], found["rooms_at_start"]) == (rooms, rooms // 10)
    assert found["growth_fraction"] <= 0.02
    for side in ("prefill", "decode"):
        one = found[side]
        assert one["succeeded"] + one["cancelled"] == rooms, "every room has ended, once"
        assert one["cancelled"] > rooms // 20, "tables of ended rooms were filled"
        assert one["succeeded"] > rooms // 3
        assert (one["fds_end"], one["threads_end"]) == (one["fds_start"], one["threads_start"])
        assert one["tables_end"]["quarantined_pages"] == 0
        # Every failed room leaves an entry in these: they have to be full before the first look.
        for table in ("tombstones", "known_rooms"):
            assert one["tables_start"][table] == one["tables_end"][table] > 0


def test_case_25_nothing_grows_over_shared_memory() -> None:
    """10^5 against 10^4, every fifth cancelled, by either side and at any time."""
    check(soak("--rooms", "100000"), 100_000)


@pytest.mark.ucx
def test_case_25_nothing_grows_over_ucx() -> None:
    """With more cancels: with fewer rooms the tables of ended rooms would not be full at the first look."""
    check(soak("--rooms", "30000", "--fabric", "ucx", "--cancel-every", "2"), 30_000)


def test_growth_is_relative_and_counts_tables_together() -> None:
    start = {"rss_bytes": 200, "fds": 10, "threads": 4, "tables": {"peers": 1, "timers": 3}}
    end = {"rss_bytes": 210, "fds": 10, "threads": 5, "tables": {"peers": 2, "timers": 2}}
    assert growth(start, end) == {"rss_bytes": 0.05, "fds": 0.0, "threads": 0.25, "tables": 0.0}


def test_growth_past_the_limit_is_a_failure() -> None:
    """So few rooms do not fill the tables of ended rooms before the first look: they grow."""
    command = [sys.executable, "-m", "kvxfer.cli", "soak", "--rooms", "1000", "--cancel-every", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "entries of all tables" in done.stdout
    assert "the limit is 2.00%" in done.stdout
