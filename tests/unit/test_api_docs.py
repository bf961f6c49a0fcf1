"""The documentation is there, and its examples run."""

from __future__ import annotations

import doctest
import inspect

import pytest

import kvxfer as kx

PUBLIC = {name: getattr(kx, name) for name in kx.__all__ if callable(getattr(kx, name))}
EXAMPLES = [
    test
    for name, item in PUBLIC.items()
    for test in doctest.DocTestFinder(recurse=False).find(item, name, globs={"kx": kx})
    if test.examples
]


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_is_documented(name: str) -> None:
    item = PUBLIC[name]
    assert inspect.getdoc(item)
    if inspect.isclass(item) and not issubclass(item, Exception):
        for member in dir(item):
            # The documentation of plain attributes is only in the source.
            if not member.startswith("_") and not inspect.ismemberdescriptor(getattr(item, member)):
                assert inspect.getdoc(getattr(item, member)), f"{name}.{member} has no documentation"


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_examples_run(test: doctest.DocTest) -> None:
    out: list[str] = []
    assert doctest.DocTestRunner().run(test, out=out.append).failed == 0, "".join(out)


def test_there_are_examples() -> None:
    assert {"Agent", "PageLayout", "PagePool", "Shard", "alloc", "plan_transfer"} <= {
        test.name for test in EXAMPLES
    }
