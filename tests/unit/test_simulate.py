"""`kvxfer._kvxfer.simulate`: whole clusters under virtual time, from Python."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kvxfer as kx
from kvxfer import _kvxfer

KEYS = {
    "seed",
    "rooms",
    "succeeded",
    "failed",
    "cancelled",
    "unended",
    "corrupt_bytes",
    "leaked_pages",
    "late_writes",
    "cancelled_mid_write",
    "kills_mid_write",
    "drain_ms_p50",
    "drain_ms_p99",
    "virtual_ms",
    "faults",
    "writes_landed",
    "frames",
    "sessions",
    "fences",
    "stale_refused",
    "violation_count",
    "violations",
    "digest",
}
BREACHES = ("unended", "corrupt_bytes", "leaked_pages", "late_writes", "violation_count")


@pytest.mark.parametrize("mover", ["sender", "receiver"])
@pytest.mark.parametrize("fence", ["completes", "impossible"])
def test_a_run_keeps_the_contract_and_a_seed_gives_it_again(mover: Any, fence: Any) -> None:
    first = _kvxfer.simulate(7, rooms=150, concurrent=32, mover=mover, fence=fence)
    assert set(first) == KEYS
    assert [first[key] for key in BREACHES] == [0] * len(BREACHES), first["violations"]
    assert first["rooms"] == 150 == sum(first[k] for k in ("succeeded", "failed", "cancelled"))
    assert first["faults"]["kill"] == 3
    assert _kvxfer.simulate(7, rooms=150, concurrent=32, mover=mover, fence=fence) == first
    other = _kvxfer.simulate(8, rooms=150, concurrent=32, mover=mover, fence=fence)
    assert other["digest"] != first["digest"]


def test_a_broken_rule_is_reported_and_its_log_shows_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rooms": 150, "concurrent": 32, "flaw": "release-on-timeout"}
    path = tmp_path / "sim.log"
    seed = next(s for s in range(8) if _kvxfer.simulate(s, **options)["late_writes"] > 0)
    report = _kvxfer.simulate(seed, log=path, **options)
    assert report["violations"]
    assert report["violation_count"] >= len(report["violations"])
    lines = path.read_text().splitlines()
    assert sum(" VIOLATION " in line for line in lines) == report["violation_count"]
    assert all(re.match(r"\d+ ", line) for line in lines)


def test_the_interpreter_runs_on_meanwhile() -> None:
    done = threading.Event()
    thread = threading.Thread(target=lambda: (_kvxfer.simulate(1, rooms=2000), done.set()))
    thread.start()
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0)
    thread.join()
    assert turns > 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rooms": 0}, "rooms is 1 to 1000000, not 0"),
        ({"concurrent": 5000}, "concurrent is 1 to 4096, not 5000"),
        ({"cancel": 1.5}, "0 to 1, not 1.5"),
        ({"cancel": float("nan")}, "0 to 1, not NaN"),
        ({"kill": 11, "rooms": 10}, "kill is 11, more than the 10 rooms"),
        ({"kill": -1}, "-1 is out of range"),
        ({"flaw": "no-such"}, 'flaw "no-such" is not known: it is one of release-on-timeout,'),
        ({"mover": "both"}, "mover is"),
        ({"fence": "maybe"}, "fence is"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(kx.BadArgument, match=re.escape(words)):
        _kvxfer.simulate(1, **options)


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        _kvxfer.simulate(1, rooms=1, kill=0, stop=0, cut=0, log=tmp_path / "none" / "sim.log")
