"""Tests with real engines: `make test-engines` runs them, in the venvs of scripts/engines_env.sh."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from asked import Plain
    from proxies import Proxies
    from servers import Server, Zygote

# Helpers of these tests only, some of which need vLLM.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are of which there is only the configuration."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(params=["in step", "ahead"])
def engine(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes engines, and closes them; their schedulers wait for each step, or run one step ahead."""
    from lab import Engine

    made: list[Any] = []

    def make(role: str, **kwargs: Any) -> Any:
        made.append(Engine(tiny, role, ahead=request.param == "ahead", **kwargs))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process that forks servers."""
    from servers import Zygote

    item = Zygote(tmp_path_factory.mktemp("servers"))
    yield item
    item.close()


@pytest.fixture(scope="session")
def servers(zygote: Zygote) -> Iterator[dict[str, Server]]:
    """One plain server, and servers of both roles with pages of 32 and of 64 tokens, started at once."""
    from servers import Server, close_all

    args: dict[int, dict[str, Any]] = {
        32: {"block": 32, "prefix_cache": True, "args": ("--num-gpu-blocks-override", "320")},
        64: {"block": 64, "prefix_cache": False, "args": ("--num-gpu-blocks-override", "160")},
    }
    made = {"plain": Server(zygote, "plain", None, **args[32])}
    for block in (32, 64):
        for name, role, extra in (("p", "kv_producer", {}), ("d", "kv_consumer", {"verify": "full"})):
            full = f"{name}{block}"
            made[full] = Server(zygote, full, role, **args[block], extra={"timeout_s": 120, **extra})
    try:
        for server in made.values():
            server.start()
        for server in made.values():
            server.ready()
        yield made
    finally:
        close_all(made.values())


@pytest.fixture(scope="session")
def truth(servers: dict[str, Server]) -> Plain:
    """What the plain server answers."""
    from asked import Plain

    return Plain(servers["plain"])


@pytest.fixture(scope="session")
def proxied(zygote: Zygote, servers: dict[str, Server]) -> Iterator[Proxies]:
    """Proxies before these servers."""
    from proxies import Proxies

    item = Proxies(zygote.logs, servers)
    yield item
    item.close()
