"""`benches/compare.py`: what is slower beyond noise is said, what is not is not."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "benches" / "compare.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare = load()


def row(pages: str, seconds: float, spread: float = 0.02) -> dict[str, Any]:
    return {
        "fabric": "shm",
        "tokens": 2000,
        "pages": pages,
        "seconds_p50": seconds,
        "seconds_p25": seconds * (1 - spread),
        "seconds_p75": seconds * (1 + spread),
        "gbytes_per_s": 0.065 / seconds,
        "writes": 16_000,
        "copy_seconds_p50": 0.01,
    }


BEFORE: dict[str, Any] = {
    "machine": {"cpu": "one", "cores": 2},
    "rows": [row("shuffled", 0.02), row("contiguous", 0.01)],
    "fairness": [{"fabric": "shm", "slowdown": 3.0}],
    "push_us_p50": 1.5,
}


def run(tmp_path: Path, after: Any, *arguments: str, before: Any = BEFORE) -> int:
    files = []
    for name, found in (("before.json", before), ("after.json", after)):
        (tmp_path / name).write_text(json.dumps(found))
        files.append(str(tmp_path / name))
    status: int = compare.main([*files, *arguments])
    return status


def test_the_same_result_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, BEFORE) == 0
    assert capsys.readouterr().out == "6 figures: 0 slower beyond noise, 0 better, the others the same\n"


def test_what_is_slower_is_named_with_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = copy.deepcopy(BEFORE)
    after["rows"][0] = row("shuffled", 0.03)
    after["push_us_p50"] = 3.0
    assert run(tmp_path, after) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "SLOWER  push_us_p50 1.5 -> 3 (+100.0%)"
    assert "SLOWER  fabric shm, tokens 2000, pages shuffled: seconds_p50 0.02 -> 0.03 (+50.0%)" in lines
    assert "SLOWER  fabric shm, tokens 2000, pages shuffled: gbytes_per_s 3.25 -> 2.16667 (+50.0%)" in lines
    assert lines[-1].startswith("6 figures: 3 slower")


def test_quartiles_that_overlap_are_noise(tmp_path: Path) -> None:
    before, after = (
        {"rows": [{key: value for key, value in row("shuffled", s, 0.4).items() if key != "gbytes_per_s"}]}
        for s in (0.02, 0.026)
    )
    assert run(tmp_path, after, before=before) == 0
    narrow = {"rows": [row("shuffled", 0.026, 0.01)]}
    assert run(tmp_path, narrow, before={"rows": [row("shuffled", 0.02, 0.01)]}) == 1


def test_what_is_within_the_tolerance_is_noise(tmp_path: Path) -> None:
    after = copy.deepcopy(BEFORE)
    after["fairness"][0]["slowdown"] = 3.6
    assert run(tmp_path, after) == 1
    assert run(tmp_path, after, "--tolerance", "0.3") == 0


def test_better_is_no_failure_and_other_machines_are_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = copy.deepcopy(BEFORE)
    after["rows"] = [row("shuffled", 0.01), row("contiguous", 0.01)]
    after["machine"]["cpu"] = "two"
    assert run(tmp_path, after) == 0
    out = capsys.readouterr().out
    assert out.startswith("not the same machine: {'cpu': 'one'")
    assert "better  fabric shm, tokens 2000, pages shuffled: seconds_p50" in out


def test_the_limit_that_got_slower_is_not_ours(tmp_path: Path) -> None:
    after = copy.deepcopy(BEFORE)
    for one in after["rows"]:
        one["copy_seconds_p50"] = 1.0
    assert run(tmp_path, after) == 0


def test_a_loss_of_nothing_compares_by_points(tmp_path: Path) -> None:
    def loop(lost: float) -> dict[str, Any]:
        return {"rows": [{"who": "kvxfer", "per_second": 8, "lost_fraction": lost}]}

    assert run(tmp_path, loop(0.02), before=loop(0.0)) == 0
    assert run(tmp_path, loop(0.02), "--tolerance", "0.01", before=loop(0.0)) == 1


def test_results_of_pytest_benchmark_compare_too(tmp_path: Path) -> None:
    def found(median: float) -> dict[str, Any]:
        stats = {"median": median, "q1": median * 0.99, "q3": median * 1.01}
        return {"benchmarks": [{"fullname": "benches/test_calls.py::test_state", "stats": stats}]}

    assert run(tmp_path, found(2e-6), before=found(1e-6)) == 1
    assert run(tmp_path, found(1e-6), before=found(2e-6)) == 0


def test_nothing_in_common_is_said(tmp_path: Path) -> None:
    assert run(tmp_path, {"rows": []}) == 2
