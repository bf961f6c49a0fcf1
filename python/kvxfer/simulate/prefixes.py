"""Prefix caches: blocks of prompts that a server has computed or got before, and still has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.simulate.request import Request
    from kvxfer.simulate.server import Server

__all__ = ["BLOCK", "Prefixes"]

# Mooncake's traces name blocks of this many tokens.
BLOCK = 512


class Prefixes:
    """The caches of all servers, each as large as its memory; what was used longest ago goes first.

    Room for them is not taken from requests, as engines evict them where pages are short.

    Args:
        blocks: of each request, the names of its prompt's blocks; None: nothing is ever found.
        servers: whose caches.
        tokens: room of each.
    """

    def __init__(
        self, blocks: tuple[tuple[int, ...], ...] | None, servers: Iterable[Server], tokens: int
    ) -> None:
        self._blocks = blocks
        self._most = tokens // BLOCK
        self._caches: dict[Server, OrderedDict[int, None]] = {server: OrderedDict() for server in servers}

    def found(self, server: Server, request: Request) -> int:
        """Tokens at the front of a prompt that a server has."""
        if self._blocks is None:
            return 0
        cache, hits = self._caches[server], 0
        for name in self._blocks[request.number]:
            if name not in cache:
                break
            cache.move_to_end(name)
            hits += 1
        # The last token has to be computed for there to be a next one.
        return min(hits * BLOCK, request.prompt - 1)

    def add(self, server: Server, request: Request, tokens: int) -> None:
        """A server has so many tokens of a prompt; its last block counts with its last token."""
        if self._blocks is None:
            return
        cache, names = self._caches[server], self._blocks[request.number]
        for name in names if tokens >= request.prompt else names[: tokens // BLOCK]:
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > self._most:
            cache.popitem(last=False)

    def clear(self, server: Server) -> None:
        """A server has lost all."""
        self._caches[server].clear()
