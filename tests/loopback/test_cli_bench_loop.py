"""`kvxfer bench loop`: blocks are made and compared right, and an interval that spans the bar is no pass."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli._bench_numbers import interval, percentile
from kvxfer.cli._bench_plot import Line, plot
from kvxfer.cli.bench_loop import _lost, _row, verdict

pytestmark = pytest.mark.timeout(110)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvxfer.cli", "bench", "loop", "--tokens", "160", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_every_row_is_there_and_the_plot_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "loop.svg"
    small = ("--blocks", "3", "--block-seconds", "0.3", "--per-second", "10", "20", "--step-ms", "2")
    result = bench(*small, "--plot", str(file), "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    rows = {(row["who"], row["per_second"]): row for row in found["rows"]}
    assert list(rows) == [("none", 0), ("copy", 10), ("kvxfer", 10), ("copy", 20), ("kvxfer", 20)]
    for (who, _), row in rows.items():
        assert row["blocks"] == 3
        # The work was fitted to 2 ms; on a busy machine it takes longer, but not for ever.
        assert 0.5 < row["step_ms_p50"] <= row["step_ms_p99"]
        assert row["step_ms_p50"] < 200
        assert row["lost_low"] <= row["lost_fraction"] <= row["lost_high"]
        assert (row["post_ms_p50"] is not None) == (who == "kvxfer")
    assert rows["none", 0]["lost_fraction"] == 0
    assert [row["per_second"] for row in found["versus_copy"]] == [10, 20]
    assert "No module named 'nixl_cu12'" in found["nixl_error"]
    drawn = ET.parse(file).getroot()
    names = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"none", "copy", "kvxfer", "10", "20", "hand-offs a second"} <= names
    # Of what the loop had no time for there is no point; the one without hand-offs stands at each rate.
    points = 2 + sum(not row["saturated"] for (who, _), row in rows.items() if who != "none")
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == points


def test_the_table_for_people_says_what_the_interval_says() -> None:
    small = ("--blocks", "3", "--block-seconds", "0.2", "--per-second", "10", "--step-ms", "2", "--no-nixl")
    result = bench(*small)
    assert result.returncode == 0, result.stderr
    assert any(word in result.stdout for word in ("pass", "fail", "inconclusive"))
    assert "could not take part" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 110


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.5, 0.9, "pass"),
        (0.2, 1.4, "inconclusive"),
        (-3, 9, "inconclusive"),
        (1.1, 2, "fail"),
        (0.3, 1.0, "pass"),
    ],
)
def test_an_interval_that_spans_the_bar_is_no_pass(low: float, high: float, said: str) -> None:
    assert verdict(low, high, 1.0) == said


def block(*steps: float, posts: tuple[float, ...] = (), left: int = 0) -> dict[str, Any]:
    return {"steps_ms": list(steps), "posts_ms": list(posts), "left": left}


def test_a_block_is_compared_with_that_of_its_own_round_and_process() -> None:
    blocks = {
        ("none", 0): [block(2, 2), block(4, 4)],
        ("none-nixl", 0): [block(3, 3), block(6, 6)],
        ("kvxfer", 8): [block(2, 3), block(5, 5)],
        ("nixl", 8): [block(6, 6, posts=(950,)), block(9, 9, posts=(930,))],
    }
    assert _lost(blocks, "kvxfer", 8) == [0.25, 0.25]
    assert _lost(blocks, "nixl", 8) == [1.0, 0.5]
    row = _row(blocks, "nixl", 8, 1.0)
    assert (row["saturated"], row["posting_fraction"], row["lost_fraction"]) == (True, 0.94, 0.75)
    ours = _row(blocks, "kvxfer", 8, 1.0)
    assert (ours["saturated"], ours["step_ms_p50"], ours["step_ms_p99"]) == (False, 4, 5)


def test_a_loop_that_cannot_begin_what_has_arrived_is_saturated() -> None:
    blocks = {("none", 0): [block(1), block(1)], ("kvxfer", 8): [block(1, left=2), block(1, left=1)]}
    assert _row(blocks, "kvxfer", 8, 1.0)["saturated"]
    blocks["kvxfer", 8] = [block(1, left=1), block(1)]
    assert not _row(blocks, "kvxfer", 8, 1.0)["saturated"]


def test_the_interval_holds_the_mean_and_narrows_with_more_blocks() -> None:
    few, many = [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0] * 25
    (low, high), (near, far) = interval(few), interval(many)
    assert low < 2.5 < high
    assert low < near < 2.5 < far < high
    assert interval([3.0] * 5) == (3.0, 3.0)
    assert percentile(range(100), 99) == 99


@pytest.mark.parametrize(
    ("spread", "ticks"),
    [
        (0.004, "4.8 5.0 5.2 5.4 5.6 5.8 6.0 6.2"),
        (3.0, "2 4 6 8 10"),
        (250.0, "-300 -200 -100 0 100 200 300"),
    ],
)
def test_a_plots_scale_is_in_round_numbers_and_holds_every_interval(spread: float, ticks: str) -> None:
    points = [(1.0, 5.0, 5.0 - spread, 5.0 + spread), (2.0, 6.0, 6.0 - spread, 6.0 + spread)]
    drawn = ET.fromstring(plot("title", "x", "y", [Line("one", points)]))
    texts = drawn.iter("{http://www.w3.org/2000/svg}text")
    assert [text.text for text in texts if text.get("text-anchor") == "end"] == ticks.split()


def test_a_plot_escapes_its_words_and_takes_a_single_point() -> None:
    drawn = ET.fromstring(plot("a < b & c", "x", "y", [Line("<one>", [(1.0, 2.0, 2.0, 2.0)])]))
    assert {"a < b & c", "<one>"} <= {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
