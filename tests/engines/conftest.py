"""Tests with real engines: `make test-engines` runs them, in the venvs of scripts/engines_env.sh."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Helpers of these tests only, some of which need vLLM.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are of which there is only the configuration."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def engine(tiny: Path) -> Iterator[Callable[..., Any]]:
    """Makes engines, and closes them."""
    from lab import Engine

    made: list[Any] = []

    def make(role: str, **kwargs: Any) -> Any:
        made.append(Engine(tiny, role, **kwargs))
        return made[-1]

    yield make
    for item in made:
        item.close()
