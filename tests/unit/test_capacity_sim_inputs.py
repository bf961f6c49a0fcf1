"""What the simulator reads: traces in their public forms, and results of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer.plan import FIELD_POSTING
from kvxfer.simulate import PUSH, Costs, Setup, TrafficError, read_trace, simulate
from kvxfer.simulate.calibrate import Calibration, CalibrationError

MOONCAKE = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 7322, "output_length": 49, "hash_ids": [0, 14]}

{"timestamp": 3000, "input_length": 700, "output_length": 1}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2024-05-10T00:00:00.009930+00:00,100,0
"""


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_a_mooncake_trace_is_read_in_the_order_of_its_times(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, "trace.jsonl", MOONCAKE))
    assert list(found.arrivals_ms) == [0, 3000, 3052]
    assert list(found.prompts) == [6758, 700, 7322]
    assert list(found.answers) == [500, 1, 49]
    assert found.blocks == ((0, 1, 2), (), (0, 14))
    twice = read_trace(write(tmp_path, "trace.jsonl", MOONCAKE), speed=2, requests=2)
    assert list(twice.arrivals_ms) == [0, 1500]


def test_an_azure_trace_is_read_to_the_digit(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, "AzureLLM.csv", AZURE), requests=2)
    assert list(found.arrivals_ms) == pytest.approx([0, 52], abs=1e-3)
    assert list(found.prompts) == [4808, 3180]
    whole = read_trace(write(tmp_path, "AzureLLM.csv", AZURE))
    # Two forms of the date are in use, and some answers are empty.
    assert whole.answers[-1] == 1
    assert whole.arrivals_ms[-1] > 1e9


def test_a_trace_can_be_simulated(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 400 * i, "input_length": 5000 + i, "output_length": 30, "hash_ids": [0, 1, 2, 9 + i]}
        for i in range(40)
    ]
    file = write(tmp_path, "trace.jsonl", "\n".join(json.dumps(row) for row in rows))
    found = simulate(Setup(PUSH), read_trace(file)).summary
    assert found["completed"] == 40
    # They come one by one, so that one server gets them all and computes the blocks that they share once.
    assert found["prefix_tokens"] == 3 * 512 * (40 - 1)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"timestamp": 0}\n', r"a\.jsonl:1: not a row of a Mooncake trace .*input_length"),
        ("a.jsonl", MOONCAKE + "nonsense\n", r"a\.jsonl:5: not a row"),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1: not a row"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.9,7\n",
            r"a\.csv:2: not a row of an Azure LLM trace",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,7,7\n", r"a\.csv:2: not a row"),
        ("a.jsonl", "", "has no requests"),
        ("a.jsonl", '{"timestamp": 0, "input_length": -1, "output_length": 5}', "-1 prompt"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(TrafficError, match=says):
        read_trace(write(tmp_path, name, text))


# As `kvxfer bench ... --json` prints them, cut down to what is read and a little more.
POST = {"push_us_p50": 1.7, "expect_us_p50": 4.0, "submit_to_first_write_us_p50": 160.0, "tokens": 2000}
PLAN = {
    "cases": [
        {"order": "HND", "pages": "shuffled", "tokens": 2000, "plan_us_p50": 56.0, "template_us_p50": 1.0},
        {"order": "HND", "pages": "shuffled", "tokens": 32_000, "plan_us_p50": 899.0, "template_us_p50": 1.0},
        {
            "order": "NHD",
            "pages": "shuffled",
            "tokens": 32_000,
            "plan_us_p50": 28_000.0,
            "template_us_p50": 9.0,
        },
    ],
    "repeats": 25,
}
TRANSFER = {
    "rows": [
        {
            "fabric": "shm",
            "memory": "kvxfer",
            "rooms": 1,
            "pages": "shuffled",
            "tokens": 32_000,
            "gbytes_per_s": 5.0,
        },
        {
            "fabric": "ucx",
            "memory": "kvxfer",
            "rooms": 1,
            "pages": "shuffled",
            "tokens": 8000,
            "gbytes_per_s": 9.0,
        },
        {
            "fabric": "ucx",
            "memory": "kvxfer",
            "rooms": 1,
            "pages": "shuffled",
            "tokens": 32_000,
            "gbytes_per_s": 11.0,
        },
        {
            "fabric": "ucx",
            "memory": "kvxfer",
            "rooms": 16,
            "pages": "shuffled",
            "tokens": 1000,
            "gbytes_per_s": 40.0,
        },
    ],
    "first_touch": [],
    "latency": [{"ping_us_p50": 60.0}, {"ping_us_p50": 40.0}],
}


def loop(tokens: int, ms: float) -> dict[str, Any]:
    rows = [{"who": "kvxfer", "post_ms_p50": 0.02}, {"who": "nixl", "post_ms_p50": ms}]
    return {"tokens": tokens, "target_step_ms": 5.5, "rows": rows}


PEERS = {
    "tokens": 2000,
    "nixl_tuned": {},
    "rows": [
        {"peer": "nixl", "pages": "shuffled", "target": "idle", "post_us_p50": 90_000.0},
        {"peer": "nixl", "pages": "contiguous", "target": "idle", "post_us_p50": 1000.0},
        {"peer": "mooncake", "pages": "shuffled", "target": "idle", "post_us_p50": 5.0},
    ],
}


def calibrated(folder: Path, *results: Any) -> Calibration:
    found = Calibration()
    for number, result in enumerate(results):
        found.read(write(folder, f"result-{number}.json", json.dumps(result)))
    return found


def test_kvxfers_own_posting_comes_from_bench_post_and_plan_in_either_order(tmp_path: Path) -> None:
    for results in ((POST, PLAN), (PLAN, POST)):
        costs = calibrated(tmp_path, *results).apply(Costs())
        assert costs.call_ms == pytest.approx(5.7e-3)
        assert costs.post_fixed_ms == pytest.approx(0.16)
        assert costs.post_ms_per_token == pytest.approx(0.899 / 32_000)


def test_a_links_speed_is_that_of_the_longest_hand_off_over_ucx(tmp_path: Path) -> None:
    found = calibrated(tmp_path, TRANSFER)
    assert found.apply(Costs()).nic_gb_s == 11.0
    assert found.apply(Costs()).control_ms == pytest.approx(0.02)
    assert "result-0.json: ucx, kvxfer memory, 32,000 tokens" in found.sources["nic_gb_s"]
    described = found.apply(Costs()).described(found.sources)
    assert described["nic_gb_s"]["source"] == found.sources["nic_gb_s"]


def test_nixls_posting_is_a_line_through_what_was_measured(tmp_path: Path) -> None:
    one = calibrated(tmp_path, loop(2000, 29.4)).apply(Costs())
    assert one.post_ms(2000) == pytest.approx(29.4)
    assert one.post_ms(16_000) == pytest.approx(2 * FIELD_POSTING.ms(16_000), rel=1e-6)
    two = calibrated(tmp_path, loop(2000, 20.0), loop(10_000, 60.0)).apply(Costs())
    assert (two.post_fixed_ms, two.post_ms_per_token) == pytest.approx((10.0, 0.005))
    assert calibrated(tmp_path, PEERS).apply(Costs()).post_ms(2000) == pytest.approx(90.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"a": 1}', "has keys a: it is no result"),
        ('{"push_us_p50": 1}', "lacks 'expect_us_p50'"),
        (json.dumps({**loop(2000, 1.0), "rows": []}), "no times of NIXL"),
    ],
)
def test_a_file_that_is_no_result_is_refused_with_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        Calibration().read(write(tmp_path, "result.json", text))


def test_a_result_that_is_given_later_counts(tmp_path: Path) -> None:
    found = calibrated(tmp_path, POST, loop(2000, 29.4))
    assert found.apply(Costs()).post_ms(2000) == pytest.approx(29.4)
    assert found.apply(Costs()).call_ms == pytest.approx(5.7e-3)
