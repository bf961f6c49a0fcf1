"""`kvxfer sim` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli import main
from kvxfer.simulate import DEFAULTS

SHORT = ["--requests", "30", "--answer", "20"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["sim", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def results(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    status, out, _ = run(capsys, "--json", *arguments)
    assert status == 0
    found: list[dict[str, Any]] = json.loads(out)["results"]
    return found


def test_the_comparison_of_the_field_makes_its_tables_and_its_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "out.png"
    status, out, _ = run(
        capsys,
        *("--compare", "pull,push,late", "--qps", "1,2,4,8", "--prompt", "1024,16384", "--slots", "8"),
        *("--plot", str(picture)),
    )
    assert status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
    for words in ("prompts of 1,024 tokens", "prompts of 16,384 tokens", "ttft ms", "slots used", "KV moved"):
        assert words in out
    # The one that fails says why.
    assert "pull at 8 req/s, prompts of 16,384 tokens: 9" in out
    assert "push at 8 req/s" not in out


def test_json_has_every_figure_with_its_unit_and_every_cost_with_its_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = run(
        capsys, "--json", "--compare", "unified,push+admission", "--qps", "2", "--prompt", "2000", *SHORT
    )
    assert status == 0
    found = json.loads(out)
    assert set(found["costs"]) == set(DEFAULTS)
    assert [one["name"] for one in found["results"]] == ["unified", "push+admission"]
    plain, split = found["results"]
    assert plain["gpus"] == split["gpus"] == 40
    assert split["setup"]["admission"] is True
    for key in (
        *("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "goodput_per_s", "completion_ms_p50"),
        *("prefill_queue_mean", "handoff_queue_mean", "slots_used_mean", "link_use_mean", "kv_moved_bytes"),
        *(
            "prefill_kv_bytes_peak",
            "decode_kv_bytes_mean",
            "offload_bytes",
            "slot_wait_ms_p99",
            "grant_wait_ms_p50",
        ),
    ):
        assert isinstance(split[key], (int, float)), key
    assert split["kv_moved_bytes"] == 30 * 2000 * 262_144
    assert plain["kv_moved_bytes"] == 0
    assert len(split["samples"]) > 100


def test_a_mode_can_have_options_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    loop, thread = results(
        capsys, "--compare", "pull,pull+thread", "--qps", "8", "--prompt", "2000", "--requests", "100"
    )
    assert (loop["setup"]["posting"], thread["setup"]["posting"]) == ("loop", "thread")
    assert thread["tpot_ms_mean"] < 0.95 * loop["tpot_ms_mean"]


def test_arrivals_can_be_bursts_users_or_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = ["--compare", "push", "--prompt", "1000", *SHORT]
    (steady,) = results(capsys, *base, "--qps", "2")
    (burst,) = results(
        capsys, *base, "--qps", "2", "--burst-factor", "30", "--burst-s", "2", "--burst-every-s", "4"
    )
    assert burst["run_s"] < 0.5 * steady["run_s"]
    few, many = results(capsys, *base, "--users", "1,10")
    assert (few["x"], many["x"]) == (1, 10)
    assert many["requests_per_s"] > 2 * few["requests_per_s"]
    file = tmp_path / "trace.jsonl"
    file.write_text(
        "\n".join(
            json.dumps({"timestamp": i * 900, "input_length": 900, "output_length": 9}) for i in range(25)
        )
    )
    slow, fast = results(capsys, "--compare", "push", "--trace", str(file), "--speed", "1,3")
    assert slow["requests"] == fast["requests"] == 25
    assert slow["run_s"] > 2 * fast["run_s"]


def test_crashes_come_at_given_times_or_at_random_for_all_modes_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = ["--compare", "unified,push", "--prefill", "2", "--decode", "2", "--prompt", "4000", "--qps", "8"]
    base += ["--requests", "200", "--answer", "30", "--on-failure", "recompute"]
    given = ["--crash", "5:prefill-1", "--crash", "8:decode-0:3", "--repair-s", "4"]
    plain, push = results(capsys, *base, *given)
    for one, numbers in ((plain, (1, 2)), (push, (1, 2))):
        assert one["crashes"] == 2
        assert [crash["server"] for crash in one["setup"]["crashes"]] == list(numbers)
        assert [crash["repair_s"] for crash in one["setup"]["crashes"]] == [4, 3]
        assert one["down_fraction"] == pytest.approx(7 / (4 * one["run_s"]))
        assert one["completed"] + one["failed"] == 200
        assert one["lost_ms_p99"] >= 0
    drawn = results(capsys, *base, "--mtbf-s", "15", "--repair-s", "2", "--seed", "3")
    assert drawn[0]["crashes"] == drawn[1]["crashes"] > 3
    _, text, _ = run(capsys, *base, *given)
    assert "push at 8 req/s, prompts of 4,000 tokens: 2 crashes, and servers were away for" in " ".join(
        text.split()
    )
    assert "tried again" in text
    _, without, _ = run(capsys, *base)
    assert "tried again" not in without


def test_prefixes_that_prompts_share_are_computed_and_moved_once(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--compare", "push", "--qps", "2", "--prompt", "4096", *SHORT, "--json"]
    (alike,) = results(capsys, *base, "--shared-prefix", "2048")
    (apart,) = results(capsys, *base)
    (off,) = results(capsys, *base, "--shared-prefix", "2048", "--no-prefix-cache")
    each = 2048 * 262_144
    assert apart["kv_moved_bytes"] == off["kv_moved_bytes"] == 30 * 2 * each
    assert alike["kv_moved_bytes"] == apart["kv_moved_bytes"] - alike["decode_prefix_tokens"] * 262_144
    assert alike["decode_prefix_tokens"] >= 25 * 2048


def test_costs_come_from_defaults_models_arguments_and_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, _ = run(capsys, "--costs")
    assert status == 0
    assert all(name in out for name in DEFAULTS)
    assert "NVIDIA's data sheet" in out
    result = tmp_path / "post.json"
    result.write_text(
        json.dumps({"push_us_p50": 1.0, "expect_us_p50": 2.0, "submit_to_first_write_us_p50": 100.0})
    )
    _, out, _ = run(
        capsys,
        *(
            "--costs",
            "--json",
            "--model",
            "llama-3.1-70b",
            "--link-gbit-s",
            "100",
            "--calibrate",
            str(result),
        ),
        *("--set", "hbm_gb=80"),
    )
    costs = json.loads(out)["costs"]
    assert costs["kv_bytes_per_token"]["value"] == 327_680
    assert costs["params_b"]["value"] == costs["active_params_b"]["value"] == 70
    assert costs["layers"]["value"] == 80
    assert costs["nic_gb_s"] == {**costs["nic_gb_s"], "value": 12.5, "source": "--link-gbit-s"}
    assert costs["post_fixed_ms"]["value"] == 0.1
    assert "post.json" in costs["call_ms"]["source"]
    assert costs["hbm_gb"]["value"] == 80
    _, out, _ = run(capsys, "--costs", "--json", "--model", "qwen3-235b-a22b")
    costs = json.loads(out)["costs"]
    assert (costs["params_b"]["value"], costs["active_params_b"]["value"]) == (235, 22)


def test_a_latent_cache_lies_on_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--costs",
        "--json",
        "--model",
        "deepseek-v3",
        "--params-b",
        "671",
        "--active-params-b",
        "37",
    ]
    one, eight = (
        json.loads(run(capsys, *arguments, "--tp", tp)[1])["costs"]["kv_bytes_per_token"]["value"]
        for tp in ("1", "8")
    )
    assert eight == pytest.approx(8 * one)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--compare", "shove"], "modes are unified, pull, push, late"),
        (["--compare", "push+luck"], "any of admission, loop, thread"),
        (["--users", "3", "--burst-factor", "2"], "two kinds of arrivals"),
        (["--trace", "t.jsonl", "--users", "3"], "--trace has its own arrivals"),
        (["--set", "luck=1"], "there is no cost 'luck'; there are gpu_tflops"),
        (["--set", "hbm_gb=much"], "'much' is no number"),
        (["--tp", "1", "--set", "hbm_gb=40"], "take a larger --tp"),
        (["--model", "deepseek-v3"], "give --params-b"),
        (["--model", "qwen4"], "no model 'qwen4'"),
        (["--qps", "1", "--burst-factor", "0.5"], "a factor is 1 or more"),
        (["--crash", "5:decode-1"], "there is no decode-1; there are decode-0 to decode-0"),
        (["--shared-prefix", "100"], "of 512 tokens or more"),
        (["--trace", "t.jsonl", "--shared-prefix", "512"], "leave out --shared-prefix"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    status, out, err = run(capsys, *arguments, *SHORT)
    assert status == 2
    assert not out
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["decode-0", "5:proxy-0", "5:decode", "x:decode-0", "5:decode-0:1:2"])
def test_a_crash_that_is_none_is_shown_how_to_write(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(capsys, "--crash", text)
    assert ended.value.code == 2
    assert f"{text} is no crash: write AT:SERVER[:REPAIR] in seconds" in capsys.readouterr().err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "none.jsonl")
    for option in ("--trace", "--calibrate"):
        status, _, err = run(capsys, option, missing)
        assert status == 1
        assert f"{missing}: No such file" in err


def test_a_plot_without_matplotlib_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    status, _, err = run(capsys, "--plot", str(tmp_path / "out.png"), *SHORT)
    assert status == 1
    assert "pip install 'kvxfer[plot]'" in err


def test_a_plot_that_cannot_be_written_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for file in (tmp_path / "no" / "out.png", tmp_path / "out.nonsense"):
        status, _, err = run(capsys, "--compare", "push", "--qps", "1", "--plot", str(file), *SHORT)
        assert status == 1
        assert "the plot cannot be written" in err
