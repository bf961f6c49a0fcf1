"""The command itself: help, version, wrong arguments."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

import kvxfer
from kvxfer.cli import main
from kvxfer.cli._text import quantity, size, table


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_version_and_help() -> None:
    assert run("--version").stdout == f"kvxfer {kvxfer.__version__}\n"
    text = run("--help").stdout
    for command in ("demo", "doctor", "bench", "stress", "plan", "sim", "proxy"):
        assert f"\n    {command} " in text


@pytest.mark.parametrize(
    "arguments",
    [
        *(("demo",), ("doctor",), ("bench",), ("stress",), ("plan",), ("sim",), ("proxy",)),
        *(("bench", name) for name in ("post", "transfer", "peers", "loop", "plan")),
    ],
)
def test_each_command_explains_itself(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--help")
    assert result.returncode == 0
    assert f"usage: kvxfer {' '.join(arguments)}" in result.stdout
    assert "--json" in result.stdout or arguments == ("bench",)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "COMMAND"),
        (("transfer",), "invalid choice"),
        (("demo", "--fabric", "carrier-pigeon"), "invalid choice: 'carrier-pigeon'"),
        (("demo", "--prefill-tp", "2"), "invalid choice: 2"),
        (("demo", "--max-tokens", "0"), "0 is less than 1"),
        (("bench", "post", "--tokens", "many"), "invalid number value: 'many'"),
        (("bench", "transfer", "--rounds", "2"), "2 is less than 3"),
        (("bench", "peers", "--peers", "carrier-pigeon"), "invalid choice: 'carrier-pigeon'"),
        (("bench", "loop", "--step-ms", "0"), "0 is not above 0"),
    ],
)
def test_wrong_arguments_are_status_2_and_say_which(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_help_imports_no_command() -> None:
    """`kvxfer --help` pays for the parser only."""
    code = (
        "import sys, kvxfer.cli\n"
        "try:\n    kvxfer.cli.main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print([m for m in sys.modules if m.startswith(('kvxfer.demo', 'kvxfer.cli.d', 'kvxfer.cli.b'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_main_in_process() -> None:
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert out.getvalue() == f"kvxfer {kvxfer.__version__}\n"


def test_text() -> None:
    assert (
        table([("a", "1", "one"), ("bcd", "22", "two\tand")], indent="") == "a    1   one\nbcd  22  two\tand"
    )
    assert table([]) == ""
    assert [size(n) for n in (0, 1023, 1024, 3 << 20, 5 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "3.0 MiB",
        "5120.0 GiB",
    ]
    assert (quantity(1, "page"), quantity(2, "page")) == ("1 page", "2 pages")
