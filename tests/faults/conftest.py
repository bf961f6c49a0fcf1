"""What the fault tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from nursery import Nursery
from two import Rank
from ways import BIG, POSIX, SHM, SMALL, TCP, Remote, Way, params

import kvxfer as kx


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[None]:
    """Most of a fault test's time would be the starts of its processes."""
    with Nursery() as found:
        Rank.nursery = found
        yield
        Rank.nursery = None


@pytest.fixture(scope="module", params=params(SHM, TCP, POSIX))
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return usable(found)


def usable(way: Way) -> Way:
    try:
        kx.alloc(kx.PageLayout(**SMALL), kx.Shard(), pages=1, fabric=way.fabric, ucx_tls=way.tls)
    except kx.FabricError as error:
        pytest.skip(f"no {way.name}: {error}")
    return way


class Others:
    """Peers to which nothing happens, for all tests of a file; a test that fails takes its peer with it."""

    def __init__(self) -> None:
        self.ranks: dict[str, Remote] = {}

    def get(self, way: Way, layout: dict[str, Any], pages: int) -> Remote:
        name = f"{way.name} {pages}"
        rank = self.ranks.get(name)
        if rank is None or rank.child.poll() is not None:
            self.ranks[name] = rank = Remote(way, layout, pages, name="other", seed=7)
        return rank

    def close(self) -> None:
        for rank in self.ranks.values():
            if rank.child.poll() is None:
                rank.__exit__()


@pytest.fixture(scope="module")
def others() -> Iterator[Others]:
    found = Others()
    yield found
    found.close()


@pytest.fixture
def other(way: Way, others: Others) -> Remote:
    return others.get(way, SMALL, 64)


@pytest.fixture
def big_other(way: Way, others: Others) -> Remote:
    """The same with large pages."""
    return others.get(way, BIG, 230)
