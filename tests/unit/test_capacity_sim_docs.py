"""docs/when-to-split.md says and shows what the simulator answers now."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvxfer.cli import main
from kvxfer.simulate import UNIFIED, Setup, poisson, simulate

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures" / "split"
TEXT = (ROOT / "docs" / "when-to-split.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_split", ROOT / "scripts" / "draw_split.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_committed_figures_are_those_of_the_simulator(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0


def test_another_figure_is_noticed_and_pictures_are_drawn(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "PICTURES", {"slots": script.PICTURES["slots"]})
    assert script.main(["--out", str(tmp_path)]) == 0
    assert script.main(["--check", "--out", str(tmp_path)]) == 0
    assert "<svg" in (tmp_path / "slots.svg").read_text(encoding="utf-8")
    file = tmp_path / "figures.json"
    committed = json.loads(file.read_text(encoding="utf-8"))
    committed["slots"]["ttft_ms_mean"]["pull"][0][1] += 1
    file.write_text(json.dumps(committed), encoding="utf-8")
    assert script.main(["--check", "--out", str(tmp_path)]) == 1
    assert "slots.svg is not what is simulated now" in capsys.readouterr().err


def test_every_picture_is_shown_and_drawn(script: ModuleType, figures: dict[str, Any]) -> None:
    assert set(figures) == set(script.PICTURES)
    for name in script.PICTURES:
        assert f"](pictures/split/{name}.svg)" in TEXT
        assert (FOLDER / f"{name}.svg").stat().st_size < 150_000
    assert {file.name for file in FOLDER.iterdir()} == {
        "figures.json",
        *(f"{name}.svg" for name in script.PICTURES),
    }


def at(lines: dict[str, Any], name: str, x: float) -> float:
    return float(dict(map(tuple, lines[name]))[x])


def test_the_figures_in_the_text_are_those_in_the_pictures(figures: dict[str, Any]) -> None:
    text = " ".join(TEXT.split())
    modes, slots, ratios = (figures[name] for name in ("modes", "slots", "ratios"))
    chat, classic = figures["goodput"]["chat, 25 ms a token"], figures["classic"]
    first = modes["ttft_ms_mean 16384"]
    for words in (
        f"pull's first token takes {at(first, 'pull', 8):,.0f} ms and push's {at(first, 'push', 8):.0f}",
        f"(16: {at(slots['ttft_ms_mean'], 'pull', 16):.0f} against "
        f"{at(slots['ttft_ms_mean'], 'push', 16):.0f} ms)",
        f"(8 users: {at(ratios['ttft_ms_mean'], '1 : 3', 8):.0f} ms with 1 : 3, "
        f"{at(ratios['ttft_ms_mean'], '3 : 1', 8):.0f} ms with 3 : 1)",
        f"(256 users: {at(ratios['requests_per_s'], '1 : 3', 256):.1f} req/s with 1 : 3, "
        f"{at(ratios['requests_per_s'], '3 : 1', 256):.1f} with 3 : 1). Plain servers: "
        f"{at(ratios['ttft_ms_mean'], '4 plain', 8):.0f} ms and "
        f"{at(ratios['requests_per_s'], '4 plain', 256):.1f} req/s",
        f"at 24 req/s, 2 : 2 still does for {at(chat, '2 : 2', 24):.0f} % of the requests, plain servers for "
        f"{at(chat, 'plain, chunks of 2,048', 24):.0f} % with chunks of 2,048 and for "
        f"{at(chat, 'plain, chunks of 512', 24):.0f} % with chunks of 512",
        f"1 : 3 stands at {at(chat, '1 : 3', 24):.0f} %",
        f"({at(classic['ttft'], 'push', 50):,.0f} against {at(classic['ttft'], 'plain', 50):,.0f} ms)",
        f"is {at(classic['ttft'], 'push', 99) / 1e3:.0f} s against "
        f"{at(classic['ttft'], 'plain', 99) / 1e3:.1f}",
        f"{at(classic['rejected'], 'push, admission', 0):.0f} of 1,840 requests",
        f"the 99th percentile is {at(classic['ttft'], 'push, admission', 99) / 1e3:.1f} s",
    ):
        assert words in text, words
    # At 1,024 tokens plain servers are first in half the time of any split.
    short = modes["ttft_ms_mean 1024"]
    assert all(at(short, "plain", 1) < 0.55 * at(short, name, 1) for name in ("pull", "push", "late push"))


def test_the_pauses_in_the_text_are_those_of_plain_servers() -> None:
    traffic = poisson(qps=2, requests=300, prompt=16_000, answer=256, seed=1)
    whole, large, small = (
        simulate(Setup(UNIFIED, prefill=1, decode=1, chunk=chunk), traffic).summary["itl_ms_max"]
        for chunk in (16_000, 2048, 512)
    )
    words = (
        f"A prompt of 16,000 tokens at TP8 stops answers for {round(whole, -1):.0f} ms at once, for "
        f"{large:.0f} ms a step in chunks of 2,048, for {small:.0f} ms in chunks of 512"
    )
    assert words in " ".join(TEXT.split())


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command[2:4]))
def test_every_command_of_the_page_runs(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command[:2] == ["kvxfer", "sim"]
    assert main(command[1:]) == 0
    assert "What users get" in capsys.readouterr().out


def test_the_page_has_at_least_three_commands() -> None:
    assert len(commands()) >= 3
