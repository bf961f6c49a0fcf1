"""`kvxfer plan`: the page, the JSON, what bites and what to change."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import kvxfer as kx
from kvxfer import plan
from kvxfer.cli import main

QWEN = "--model qwen3-32b --prompt 16000 --output 128 --link-gbit-s 400 --tp 8"
FIELD = f"{QWEN} --qps 8 --tpot-ms 10.4 --slots 8"
LLAMA = "--model llama-3.1-70b --prompt 32768 --output 8192 --link-gbit-s 100 --tpot-ms 20 --qps 0.01"


def page(arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["plan", *arguments.split()]) == 0
    return out.getvalue()


def numbers(arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page(f"{arguments} --json"))
    return found


def refusal(arguments: str) -> str:
    out = io.StringIO()
    with redirect_stderr(out):
        assert main(["plan", *arguments.split()]) == 2
    return out.getvalue()


def test_the_command_of_the_issue_as_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "plan", *FIELD.split(), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = json.loads(done.stdout)
    keys = {
        "kv_bytes_per_token",
        "kv_bytes",
        "transfer_ms",
        "slots_held",
        "slots",
        "loop_lost_fraction",
        "verdict",
    }
    assert keys <= set(found)
    assert found["kv_bytes_per_token"] == 256 * 1024
    assert found["kv_bytes"] == 16_000 * 256 * 1024
    assert round(found["transfer_ms"], 1) == 10.5
    assert round(found["slots_held"], 1) == 10.6
    assert found["slots"] == 8
    # What makes 10.4 ms a token out of 7.0.
    assert found["loop_lost_fraction"] == pytest.approx(1 - 7.0 / 10.4)


def test_the_command_with_a_models_own_config_prints_a_page(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    config = {"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    file.write_text(json.dumps({**config, "torch_dtype": "bfloat16", "model_type": "qwen3"}))
    arguments = "--qps 8 --prompt 16000 --output 128 --tpot-ms 10.4 --slots 8 --link-gbit-s 400 --tp 8"
    text = page(f"--model {file} {arguments}")
    # Numbers, the one that bites, what to change.
    for words in (
        "256.0 KiB",
        "10.5 ms",
        "10.6 of 8",
        "at peak load",
        "what bites: slots",
        "what to change:",
    ):
        assert words in text, words
    assert text.count("\n") < 40
    assert max(len(line) for line in text.replace(str(file), "config.json").splitlines()) <= 120
    assert numbers(f"--model {file} {arguments}")["kv_bytes"] == 16_000 * 256 * 1024


def test_the_verdict_names_the_one_that_bites_and_what_to_change() -> None:
    found = numbers(FIELD)
    assert found["bites"] == "slots"
    verdict = found["verdict"]
    assert verdict.startswith("slots: 10.6 of 8 decode slots are held on average (133 %); keep it under 80 %")
    assert "take the posting off the decode loop" in verdict
    assert "10.4 ms a token becomes 7.0, and 7.2 slots are held" in verdict
    # More slots only where the memory is.
    assert "9 slots" in verdict
    assert "if each rank has" in verdict
    assert found["qps_slots_run_out"] < 8 < found["qps_slots_run_out_posting_off_loop"]
    text = page(FIELD)
    assert "what bites: slots" in text
    assert "10.6 of 8 (133 %; keep under 80 %)" in text
    assert "10.5 ms at 50 GB/s a rank" in text
    assert "256.0 KiB" in text


def test_slots_are_kept_under_80_percent_even_when_they_do_not_run_out() -> None:
    found = numbers(f"{QWEN} --qps 8 --tpot-ms 7.0 --slots 8 --posting thread")
    assert round(found["slots_held"], 1) == 7.2
    assert found["bites"] == "slots"
    assert "(89.6 %); keep it under 80 %" in found["verdict"]
    fits = numbers(f"{QWEN} --qps 8 --tpot-ms 7.0 --slots 9 --posting thread")
    assert fits["bites"] is None
    assert fits["verdict"].startswith("nothing bites. The nearest to its limit: 7.2 of 9")
    assert fits["loop_lost_fraction"] < 1e-3


def test_measured_posting_at_2000_tokens() -> None:
    found = numbers("--model qwen3-32b --qps 8 --prompt 2000 --tpot-ms 6.14 --slots 16 --tp 8")
    assert round(found["loop_lost_fraction"] * 100, 1) == 11.8
    assert found["bites"] == "loop"
    given = numbers("--model qwen3-32b --qps 8 --prompt 2000 --tpot-ms 6.14 --slots 16 --posting-ms 5")
    assert given["loop_lost_fraction"] == pytest.approx(0.04)
    hopeless = numbers("--model qwen3-32b --qps 200 --prompt 2000 --output 1 --tpot-ms 5 --slots 16 --tp 8")
    assert hopeless["loop_lost_fraction"] > 1
    assert hopeless["bites"] == "loop"


def test_more_slots_only_where_the_memory_is() -> None:
    roomy = numbers(f"{FIELD} --kv-memory-gib 40")
    assert "hold them" in roomy["verdict"]
    tight = numbers(f"{FIELD} --kv-memory-gib 4.2")
    # 8 slots of 16,128 tokens are 3.94 GiB on a rank, and 9 are 4.43.
    assert tight["slots_in_memory"] == 8
    assert "more decode servers, and not more slots" in tight["verdict"]
    full = numbers(f"{FIELD} --kv-memory-gib 2")
    assert full["bites"] == "memory"
    assert "4 slots, which is what fits" in full["verdict"]


def test_room_for_the_answer_as_well_as_the_prompt() -> None:
    found = numbers(LLAMA)
    assert found["kv_bytes"] == 10 * 2**30
    assert found["answer_kv_bytes"] == 2.5 * 2**30
    assert round(found["transfer_ms"] / 1e3, 2) == 0.86
    assert round(found["answer_s"]) == 164
    assert "2.5 GiB more for 8,192 tokens" in page(LLAMA)
    assert round(numbers(f"{LLAMA} --burst 10")["burst_ms"] / 1e3, 1) == 8.6
    assert "10 at once" in page(f"{LLAMA} --burst 10")


def test_a_slo_of_the_first_token() -> None:
    found = numbers(f"{LLAMA} --slo-ttft 300")
    assert found["bites"] == "first token"
    assert found["transfer_meets_slo"] is False
    assert found["transfer_share_of_answer"] < 0.01
    text = page(f"{LLAMA} --slo-ttft 300")
    assert "too late for the SLO" in text
    assert "0.52 % of the answer's time" in text
    assert numbers(f"{LLAMA} --slo-ttft 1000")["bites"] is None


def test_prefill_rates_ratio_and_split() -> None:
    more = "--prefill-tokens-per-s 20000 --servers 8 --slo-ttft 900 --posting thread"
    found = numbers(f"{QWEN} --qps 2 --tpot-ms 7 --slots 8 {more}")
    assert found["sooner"] == "transfer"
    assert found["recompute_ms"] == pytest.approx(800)
    assert found["recompute_meets_slo"] is True
    assert [x["prompt_tokens"] for x in found["by_prompt_length"]] == [1024, 4096, 16_000, 16_384, 65_536]
    assert found["transfer_sooner_from_tokens"] == 0
    # 0.8 s of prefill, and 128 tokens at 6.4 slots / 7 ms.
    assert found["prefill_servers_per_decode_server"] == pytest.approx(0.8 / (128 / (6.4 / 0.007)))
    assert found["split"]["prefill"] + found["split"]["decode"] == 8
    assert found["split"]["qps"] < found["split"]["plain_qps"]
    text = page(f"{QWEN} --qps 2 --tpot-ms 7 --slots 8 {more}")
    assert "prefill : decode" in text
    assert "as many plain servers" in text
    late = numbers(f"{QWEN} --qps 2 --tpot-ms 7 --slots 8 --handoff-ms 2 --prefill-tokens-per-s 20000000")
    assert late["sooner"] == "recompute"


def test_too_little_prefill_bites() -> None:
    more = "--prefill-tokens-per-s 2000 --servers 4 --posting thread"
    found = numbers(f"{QWEN} --qps 4 --tpot-ms 7 --slots 8 {more}")
    assert found["bites"] == "prefill"
    assert "keep it under 80 %" in found["verdict"]


def test_a_link_that_is_too_slow_bites() -> None:
    found = numbers(
        "--model qwen3-32b --qps 4 --prompt 16000 --tpot-ms 7 --slots 64 --link-gbit-s 100 --posting thread"
    )
    assert found["link_used_fraction"] > 1
    assert found["bites"] == "link"
    assert "fp8 KV" in found["verdict"]


def test_latent_kv_goes_to_every_rank_whole() -> None:
    one = numbers("--model deepseek-v3 --tp 1")
    eight = numbers("--model deepseek-v3 --tp 8")
    assert one["transfer_ms"] == eight["transfer_ms"]


def test_models_by_config_by_hand_and_by_list(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
        )
    )
    by_file = numbers(f"--model {config}")
    by_hand = numbers("--layers 64 --kv-heads 8 --head-dim 128")
    assert by_file["kv_bytes_per_token"] == by_hand["kv_bytes_per_token"] == 256 * 1024
    assert "note: the config names no dtype" in page(f"--model {config}")
    assert (
        numbers("--layers 64 --kv-heads 8 --head-dim 128 --kv-dtype fp8 --kv-scales 1")["kv_bytes_per_token"]
        == 64 * 2 * 8 * 132
    )
    assert {m["model"] for m in numbers("--list-models")["models"]} == set(plan.MODELS)
    assert "Qwen/Qwen3-32B" in page("--list-models")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "which model? Give --model NAME"),
        ("--layers 3", "all of --layers, --kv-heads and --head-dim"),
        ("--model qwen3-32b --kv-heads 3", "--model and --kv-heads both say"),
        ("--model qwen3-3b", "did you mean qwen3-"),
        ("--model qwen3-32b --servers 4", "--prefill-tokens-per-s"),
    ],
)
def test_wrong_arguments_teach(arguments: str, said: str) -> None:
    text = refusal(arguments)
    assert said in text
    assert text.startswith("kvxfer: ")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--qps", "0"], ["--tpot-ms", "-1"], ["--slots", "0"], ["--qps", "nan"]]
)
def test_numbers_that_cannot_be(arguments: list[str]) -> None:
    with redirect_stderr(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "qwen3-32b", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in out.getvalue()


def test_the_function_refuses_a_place_that_is_none() -> None:
    with pytest.raises(kx.BadArgument, match="posting='cloud'"):
        plan.capacity(
            plan.model("qwen3-32b"),
            qps=1,
            prompt=1,
            output=1,
            tpot_ms=1,
            slots=1,
            link_gbit_s=1,
            posting="cloud",  # type: ignore[arg-type]
        )
