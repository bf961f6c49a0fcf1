"""docs/safety.md names a test for each claim, and each field case has a test that names its number."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAFETY = ROOT / "docs" / "safety.md"
CASES = range(1, 26)


@cache
def sources() -> dict[Path, str]:
    files = [*ROOT.glob("rust/*/src/**/*.rs"), *ROOT.glob("rust/*/tests/**/*.rs")]
    files += [f for f in ROOT.glob("tests/**/*.py") if f != Path(__file__)]
    return {file: file.read_text() for file in files}


def claims(text: str) -> list[tuple[str, str]]:
    """Every `file::test` in backticks; a bare `::test` or `test` after a file belongs to that file."""
    found, file = [], ""
    for quoted in re.findall(r"`([^`\n]+)`", text):
        match = re.fullmatch(r"([\w/.-]+\.(?:rs|py))?::(\w+)", quoted)
        if match:
            file = match[1] or file
            found.append((file, match[2]))
    return found


def has_test(file: str, name: str) -> bool:
    return any(
        path.as_posix().endswith("/" + file) and re.search(rf"\b(?:fn|def) {name}\b", text)
        for path, text in sources().items()
    )


def test_every_test_that_the_safety_page_names_exists() -> None:
    named = claims(SAFETY.read_text())
    assert len(named) >= 10
    assert [f"{file}::{name}" for file, name in named if not has_test(file, name)] == []


def test_a_claim_without_its_test_is_found() -> None:
    assert claims("held by `a/b.rs::one`, `::two`, and `c.py::three`; `not::a test`") == [
        ("a/b.rs", "one"),
        ("a/b.rs", "two"),
        ("c.py", "three"),
    ]
    assert not has_test("kvxfer-proto/tests/node_pair.rs", "no_such_test")
    assert not has_test("no/such/file.rs", "lost_sessions_change_nothing_but_the_time")
    assert has_test("kvxfer-proto/tests/node_pair.rs", "lost_sessions_change_nothing_but_the_time")


@pytest.mark.parametrize("number", CASES)
def test_each_field_case_has_a_test_that_names_its_number(number: int) -> None:
    pattern = re.compile(rf"\b(?:fn|def) \w*case_0?{number}(?!\d)")
    assert any(pattern.search(text) for text in sources().values())
