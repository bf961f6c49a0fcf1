"""`kvxfer demo` with real processes: the answer of two engines is that of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvxfer.demo import DemoUnavailable
from kvxfer.demo.weights import find_model_file

COMMAND = [sys.executable, "-m", "kvxfer.cli", "demo", "--json", "--max-tokens", "5"]
SHORT = "What is the capital of France?"


def is_there() -> bool:
    try:
        find_model_file()
    except DemoUnavailable:
        return False
    return find_spec("gguf") is not None and find_spec("tokenizers") is not None


pytestmark = [
    pytest.mark.skipif(not is_there(), reason="the packages of the demo extra are not installed"),
    pytest.mark.timeout(100),
]


def has_ucx() -> bool:
    from kvxfer import FabricError, _kvxfer
    from kvxfer._memory import ucx_wheel_dir

    try:
        _kvxfer._doctor_ucx(ucx_wheel_dir())
    except FabricError:
        return False
    return True


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def check(found: dict[str, Any], fabric: str, prefill_tp: int, decode_tp: int) -> None:
    assert found["tokens_identical"] is True
    assert (found["fabric"], found["prefill_tp"], found["decode_tp"]) == (fabric, prefill_tp, decode_tp)
    assert 1 <= len(found["tokens"]) <= 5
    assert found["tokens"] == found["reference_tokens"]
    assert found["text"] == found["reference_text"] != ""
    # 30 layers of K and V, 3 heads of 64 float16: exactly the prompt's tokens crossed, each once.
    assert found["bytes"] == found["prompt_tokens"] * 30 * 2 * 3 * 64 * 2
    assert found["pages"] == -(-found["prompt_tokens"] // found["page_tokens"])
    assert found["push_us_p50"] > 0
    assert found["expect_us_p50"] > 0
    assert found["expects"] == decode_tp
    for stage in ("load", "agents", "prefill", "handoff", "decode", "total"):
        assert 0 < found["stages_ms"][stage] < 90_000, stage


def test_two_demos_at_once() -> None:
    """One rank each in chunks, and three to one with the prompt at once, beside each other."""
    first = start("--chunk", "13", "--prompt", SHORT)
    second = start("--prefill-tp", "3", "--prompt", SHORT, "--chunk", "1000")
    try:
        one, three = finish(first), finish(second)
    finally:
        first.kill()
        second.kill()
    check(one, "shm", 1, 1)
    check(three, "shm", 3, 1)
    chunks = -(-one["prompt_tokens"] // 13)
    assert one["pushes"] == 30 * chunks
    assert three["pushes"] == 3 * 30
    assert one["text"] == three["text"]


@pytest.mark.ucx
def test_one_prefill_rank_and_three_decode_ranks_over_ucx() -> None:
    if not has_ucx():
        pytest.skip("there is no UCX")
    check(finish(start("--fabric", "ucx", "--decode-tp", "3", "--prompt", SHORT)), "ucx", 1, 3)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_rank_that_dies_ends_the_demo_with_its_name() -> None:
    demo = start("--prompt", SHORT)
    try:
        wait_until(lambda: len(children(demo.pid)) == 3, "three processes start")
        ranks = children(demo.pid)
        os.kill(ranks[1], signal.SIGKILL)
        out, err = demo.communicate(timeout=30)
    finally:
        demo.kill()
    assert demo.returncode == 1
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last == "kvxfer: decode-0 was killed by SIGKILL"
    assert "Traceback" not in err
    assert not any(is_running(pid) for pid in ranks)


def test_ranks_do_not_outlive_a_demo_that_is_killed() -> None:
    demo = start("--prompt", SHORT)
    try:
        wait_until(lambda: len(children(demo.pid)) == 3, "three processes start")
        ranks = children(demo.pid)
    finally:
        demo.kill()
        demo.communicate(timeout=30)
    wait_until(lambda: not any(is_running(pid) for pid in ranks), "all ranks end")


def test_what_is_missing_is_said_in_one_line() -> None:
    result = subprocess.run(
        COMMAND,
        env={**os.environ, "KVXFER_DEMO_MODEL": "/nonexistent.gguf"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == "kvxfer: KVXFER_DEMO_MODEL names /nonexistent.gguf, which is not a file\n"


def test_a_prompt_that_does_not_fit_says_so() -> None:
    demo = start("--prompt", "word " * 9000)
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "reference: the prompt's 90" in err.splitlines()[-1]
    assert "give a shorter --prompt" in err.splitlines()[-1]


@pytest.mark.parametrize(("orders", "pages"), [(("HND", "NHD"), (16, 32)), (("NHD", "HND"), (48, 32))])
@pytest.mark.parametrize("sizes", [(3, 1), (1, 3)])
def test_other_orders_and_page_sizes_on_each_side(
    sizes: tuple[int, int], orders: tuple[str, str], pages: tuple[int, int]
) -> None:
    arguments = ["--prompt", SHORT, "--chunk", "13"]
    for side, tp, order, tokens in zip(("prefill", "decode"), sizes, orders, pages, strict=True):
        arguments += [f"--{side}-tp", str(tp), f"--{side}-order", order, f"--{side}-page-tokens", str(tokens)]
    found = finish(start(*arguments))
    check(found, "shm", *sizes)
    assert (found["page_tokens"], found["prefill_page_tokens"]) == (pages[1], pages[0])
